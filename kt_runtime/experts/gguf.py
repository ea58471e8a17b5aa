"""The tensors of a GGUF model (kt_runtime/gguf_file.py): experts for the native loader, all others as plain tensors.

The native loader gets open files and the offsets of the experts' tensors; it packs their blocks as they are
(csrc/weights/gguf_layer.h). Every other tensor is dequantized with the `gguf` package, some rows at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kt_runtime import _experts
from kt_runtime.checkpoint_file import Entry
from kt_runtime.errors import CheckpointError
from kt_runtime.experts.native import translated_errors
from kt_runtime.files import read_at
from kt_runtime.gguf_file import BLOCKS, GgufFile, open_gguf

METHOD = "gguf"
"""`quant_method` of the config.json of a directory that stands for a GGUF model (serve/models/gguf_model.py); `files`
of that object are the paths of the model's files."""
EXPERTS = "_exps."
_STRIP_BYTES = 64 << 20


def gguf_files(quantization: Mapping[str, Any] | None) -> list[Path]:
    """The files of a GGUF model, from its config.json's `quantization_config`; empty for any other checkpoint.

    Raises CheckpointError for paths that are none.
    """
    if quantization is None or quantization.get("quant_method") != METHOD:
        return []
    files = quantization.get("files")
    if not isinstance(files, list) or not files or not all(isinstance(file, str) and file for file in files):
        raise CheckpointError(f"config.json: quantization_config: 'files' is {str(files)[:80]}; expected paths")
    return [Path(file) for file in files]


def open_gguf_checkpoint(directory: Path, files: Sequence[Path]) -> _experts.Checkpoint:
    """The experts' tensors for `_experts.load_layer`, under the prefixes `blk.LAYER`. Raises as `open_gguf`."""
    checkpoint = _experts.Checkpoint(str(directory), None)
    for path in files:
        with translated_errors(), open_gguf(path) as (descriptor, file):
            experts = {name: entry for name, entry in file.tensors.items() if EXPERTS in name}
            checkpoint.add_file(str(path), descriptor, experts)
    return checkpoint


class GgufTensors:
    """Dequantizes single tensors of a model's files. A context manager: closes the files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._stack = contextlib.ExitStack()
        self._tensors: dict[str, tuple[int, GgufFile, Entry]] = {}
        with contextlib.ExitStack() as opened:
            for path in files:
                descriptor, file = opened.enter_context(open_gguf(path))
                self._tensors |= {name: (descriptor, file, entry) for name, entry in file.tensors.items()}
            self._stack = opened.pop_all()

    def __enter__(self) -> GgufTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor as `dtype`, rounded once from float32. Raises CheckpointError for one that is missing, can't be
        read, or holds NaN or infinity."""
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name!r} is missing in the GGUF model")
        descriptor, file, entry = self._tensors[name]
        out = torch.empty(math.prod(entry.shape[:-1]), entry.shape[-1], dtype=dtype)
        row = 0
        for values in _rows(descriptor, file.path, name, entry):
            if not torch.isfinite(values).all():
                raise CheckpointError(f"{file.path}: tensor {name!r} holds NaN or infinity")
            out[row : row + len(values)] = values
            row += len(values)
        return out.reshape(entry.shape)


def _rows(descriptor: int, path: Path, name: str, entry: Entry) -> Iterator[torch.Tensor]:
    """The rows of a tensor as float32 [rows, columns], some at a time."""
    import gguf  # takes half a second
    import numpy as np

    per_block, block_bytes = BLOCKS[entry.dtype]
    row_bytes = entry.shape[-1] // per_block * block_bytes
    rows = math.prod(entry.shape[:-1])
    at_once = max(1, _STRIP_BYTES // (4 * entry.shape[-1]))
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        data = read_at(descriptor, count * row_bytes, entry.start + first * row_bytes)
        if len(data) != count * row_bytes:
            raise CheckpointError(f"{path}: tensor {name!r} is truncated: the file has become shorter")
        raw = np.frombuffer(data, np.uint8).reshape(count, row_bytes)
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[entry.dtype])
        yield torch.from_numpy(np.require(values, np.float32, ["C", "W"]).reshape(count, entry.shape[-1]))
