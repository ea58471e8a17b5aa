"""A dataset in a folder of the test's own, and a recipe that names it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.train.data import read_datasets


def to_bytes(rows: list[Any], suffix: str) -> bytes:
    if suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(
            {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()} for row in rows
        )
        return text.getvalue().encode()
    if suffix == ".jsonl":
        return "\n".join(json.dumps(row) for row in rows).encode()
    return json.dumps(rows, indent=1, ensure_ascii=False).encode()


class Datasets:
    """`said`: the lines that reading said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.said: list[str] = []
        self._entries: dict[str, Any] = {}

    def add(self, rows: list[Any] | bytes, *, name: str = "d", file_name: str = "d.jsonl", **entry: Any) -> Path:
        path = self.directory / file_name
        path.write_bytes(rows if isinstance(rows, bytes) else to_bytes(rows, path.suffix))
        self.describe(name, file_name=file_name, **entry)
        return path

    def describe(self, name: str = "d", **entry: Any) -> None:
        self._entries[name] = entry
        (self.directory / "dataset_info.json").write_text(json.dumps(self._entries, indent=2))

    def recipe(self, **keys: Any) -> Any:
        defaults = {
            "stage": "sft",
            "dataset_dir": self.directory,
            "mix_strategy": "concat",
            "interleave_probs": None,
            "max_samples": None,
            "default_system": None,
            "mask_history": False,
            "seed": 42,
            "where": lambda key: "recipe.yaml:3",
        }
        return SimpleNamespace(**{**defaults, **keys})

    def read(self, *names: str, **keys: Any) -> list[Any]:
        self.said.clear()
        return list(read_datasets(self.recipe(**keys), names or ("d",), self.said.append))

    def read_rows(self, rows: list[Any] | bytes, keys: dict[str, Any] | None = None, **entry: Any) -> list[Any]:
        self.add(rows, **entry)
        return self.read(**(keys or {}))


@pytest.fixture
def datasets(tmp_path: Path) -> Datasets:
    return Datasets(tmp_path)


@pytest.fixture
def make_bytes() -> Callable[[list[Any], str], bytes]:
    return to_bytes
