"""Adapter directories for a tiny model: good ones, and the same with one thing wrong."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reference import lora
from safetensors.torch import load_file, save_file

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def good_adapters(model: Path, place: Path, count: int) -> list[Path]:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return [
        lora.write_adapter(place / f"good-{seed}", lora.random_adapter(config, rank=4, alpha=8.0, seed=seed))
        for seed in range(count)
    ]


def broken_adapters(good: Path, place: Path) -> list[Path]:
    made = []
    for name, damage in DAMAGES.items():
        directory = place / name
        shutil.copytree(good, directory)
        damage(directory)
        made.append(directory)
    return made


def _filled(value: float) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        found = load_file(directory / WEIGHTS)
        save_file({name: torch.full_like(tensor, value) for name, tensor in found.items()}, directory / WEIGHTS)

    return apply


def _header(text: bytes) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text)

    return apply


def _weights(content: bytes) -> Callable[[Path], None]:
    return lambda directory: _write(directory / WEIGHTS, content)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _cut(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[: len(content) // 2])


def _config(**values: Any) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        found = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        (directory / CONFIG).write_text(json.dumps({**found, **values}), encoding="utf-8")

    return apply


def _loop(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to(WEIGHTS)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "huge": _filled(3e38),
    "large": _filled(1e19),
    "nan": _filled(float("nan")),
    "infinite": _filled(float("inf")),
    "cut": _cut,
    "empty-weights": _weights(b""),
    "long-header": _weights(struct.pack("<Q", 2**63) + b"{}"),
    "many-digits": _header(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'),
    "deep-header": _header(b'{"a":' * 3000 + b"1" + b"}" * 3000),
    "not-json": _header(b"{" * 50),
    "no-weights": lambda directory: (directory / WEIGHTS).unlink(),
    "no-config": lambda directory: (directory / CONFIG).unlink(),
    "config-list": lambda directory: _write(directory / CONFIG, b"[]"),
    "config-deep": lambda directory: _write(directory / CONFIG, b"[" * 100_000),
    "config-bytes": lambda directory: _write(directory / CONFIG, b"\xff\xfe\0"),
    "rank": _config(r=10**9),
    "rank-digits": _config(r=10**400),
    "alpha": _config(lora_alpha=1e308),
    "targets": _config(target_modules=["x"] * 1000),
    "pattern": _config(rank_pattern={"(a+)+b$": 4}, alpha_pattern={"(": 1}),
    "regex": _config(target_modules="(a+)+b$"),
    "loop": _loop,
}
