"""The files of the weights that both sides read: a checkpoint, or one GGUF file for the server and llama.cpp."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.bench.serve.gguf.model import write_gguf_model
from kt_runtime.gguf_file import read_gguf
from kt_runtime.serve.models.checkpoint_files import read_config
from kt_runtime.serve.models.gguf_model import gguf_directory


@dataclass(frozen=True)
class ServedFile:
    """A quantized GGUF file. `config`: as kt-runtime reads it from the file. `types`: tensors of each type."""

    path: Path
    size_bytes: int
    mix: str
    config: Mapping[str, Any]
    types: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        return {"mix": self.mix, "bytes": self.size_bytes, "types": dict(self.types)}


@contextlib.contextmanager
def served_file(
    model: Path, mix: str | None, directory: Path, say: Callable[[str], None]
) -> Iterator[ServedFile | None]:
    """Writes the checkpoint `model` as a GGUF file of `mix` in `directory`; None without a mix.

    The directory that stands for the file in the user's cache is removed at the end. Raises as `write_gguf_model` and
    `gguf_directory`.
    """
    if mix is None:
        yield None
        return
    path = directory / f"model.{mix}.gguf"
    say(f"the GGUF file in {mix}")
    write_gguf_model(model, path, mix)
    stands_for_it = gguf_directory(path)
    try:
        types = Counter(entry.dtype for entry in read_gguf(path).tensors.values())
        yield ServedFile(path, path.stat().st_size, mix, read_config(stands_for_it), types)
    finally:
        shutil.rmtree(stands_for_it, ignore_errors=True)
