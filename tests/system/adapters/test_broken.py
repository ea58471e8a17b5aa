"""A broken adapter directory is refused with the reason by a real server, and what is served stays as it was."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from reference import lora
from safetensors.torch import load_file, save_file

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Break = Callable[[Path], None]


@dataclass
class Loaded:
    server: Any
    good: Path

    def state(self) -> Any:
        body = {"input_ids": [9, 8, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 8}, "lora_path": "kept"}
        return self.server.api.get("/kt/adapters"), self.server.api.post("/generate", body)["output_ids"]

    def load(self, path: Path) -> httpx.Response:
        body = {"name": "kept", "path": str(path)}
        return httpx.post(f"{self.server.api.url}/kt/adapters", json=body, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def loaded(float32_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    place = tmp_path_factory.mktemp("adapter")
    config = json.loads((float32_server.model_directory / "config.json").read_text())
    good = lora.write_adapter(place / "good", lora.random_adapter(config, rank=4, alpha=8.0, seed=1))
    loaded = Loaded(float32_server, good)
    assert loaded.load(good).is_success
    deadline = time.monotonic() + 60
    while not float32_server.api.get("/kt/adapters/kept")["versions"][0]["stored"]:
        assert time.monotonic() < deadline, "the version was not written"
        time.sleep(0.05)
    yield loaded
    float32_server.api.delete("/kt/adapters/kept")


def tensors(change: Callable[[dict[str, torch.Tensor], str], None]) -> Break:
    """Changes the weights; the second argument is the name of a lora_B of o_proj."""

    def apply(directory: Path) -> None:
        found = load_file(directory / WEIGHTS)
        change(found, next(name for name in sorted(found) if name.endswith("o_proj.lora_B.weight")))
        save_file(found, directory / WEIGHTS)

    return apply


def config(**values: Any) -> Break:
    def apply(directory: Path) -> None:
        found = json.loads((directory / CONFIG).read_text())
        (directory / CONFIG).write_text(json.dumps({**found, **values}))

    return apply


def truncate(directory: Path) -> None:
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[: len(data) // 2])


def only_pickle(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "adapter_model.bin")


def link(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory.parent / "elsewhere.safetensors")
    (directory / WEIGHTS).symlink_to(directory.parent / "elsewhere.safetensors")


def long_header(directory: Path) -> None:
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 63) + data[8:])


def overlapping(directory: Path) -> None:
    """Two tensors of one shape have the same bytes; those of the second belong to nobody."""
    data = (directory / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    first, second = [name for name in sorted(header) if name.endswith("o_proj.lora_B.weight")][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    changed = json.dumps(header).encode().ljust(length)
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + length :])


def no_file(make: Callable[[Path], None], name: str = WEIGHTS) -> Break:
    """Something else in the file's place."""

    def apply(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return apply


def no_json(path: Path) -> None:
    path.write_text("{")


def endless_settings(directory: Path) -> None:
    os.truncate(directory / CONFIG, 1 << 30)


BROKEN: dict[str, tuple[Break, str]] = {
    "truncated": (truncate, WEIGHTS),
    "header of 2^63 bytes": (long_header, WEIGHTS),
    "overlapping tensors": (overlapping, WEIGHTS),
    "empty file": (no_file(Path.touch), WEIGHTS),
    "pipe": (no_file(os.mkfifo), WEIGHTS),
    "directory": (no_file(Path.mkdir), WEIGHTS),
    "no JSON": (no_file(no_json, CONFIG), CONFIG),
    "settings of a GiB": (endless_settings, CONFIG),
    "whole numbers": (tensors(lambda t, b: t.update({b: t[b].to(torch.int64)})), "lora_B"),
    "rank below 0": (config(r=-5), "-5"),
    "wrong shape": (tensors(lambda t, b: t.update({b: t[b][:-1].clone()})), "shape"),
    "missing lora_B": (tensors(lambda t, b: t.__delitem__(b)), "lora_B"),
    "unknown key": (
        tensors(lambda t, b: t.update({"model.nonsense.lora_A.weight": t[b].clone()})),
        "nonsense",
    ),
    "NaN": (tensors(lambda t, b: t.update({b: t[b] * float("nan")})), "NaN"),
    "huge": (tensors(lambda t, b: t.update({k: torch.full_like(v, 3e38) for k, v in t.items()})), "not finite"),
    "rank 0": (config(r=0), "0"),
    "rank above the server's": (config(r=512), "512"),
    "symlink": (link, "symbolic link"),
    "pickle": (only_pickle, "adapter_model.bin"),
    "DoRA": (config(use_dora=True), "dora"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_directory_is_refused_with_the_reason_and_changes_nothing(
    loaded: Loaded, tmp_path: Path, name: str
) -> None:
    before = loaded.state()
    broken = Path(shutil.copytree(loaded.good, tmp_path / "broken"))
    spoil, reason = BROKEN[name]
    spoil(broken)
    answer = loaded.load(broken)
    assert answer.status_code == 400, answer.text
    assert reason.lower() in answer.json()["error"]["message"].lower()
    assert loaded.state() == before


@pytest.mark.parametrize(
    "path", ["relative/path", "/nonexistent/adapter", "someone/an-adapter-on-a-hub", "/etc/passwd"]
)
def test_what_is_no_directory_here_is_refused_and_never_looked_for_elsewhere(loaded: Loaded, path: str) -> None:
    before = loaded.state()
    answer = loaded.load(Path(path))
    assert answer.status_code in (400, 404), answer.text
    assert path in answer.json()["error"]["message"]
    assert loaded.state() == before
