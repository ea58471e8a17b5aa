"""The tensors of a GGUF model (kt_runtime/gguf_file.py): experts for the native loader, all others as plain tensors.

The native loader gets open files and the offsets of the experts' tensors; it packs their blocks as they are
(csrc/weights/gguf_layer.h). Matrices of linear layers may stay quantized too (`GgufTensors.packed`). Every other tensor
is dequantized with the `gguf` package, some rows at a time, and put into Hugging Face's order (`families.gguf.layout`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kt_runtime import _experts
from kt_runtime.checkpoint_file import Entry
from kt_runtime.errors import CheckpointError
from kt_runtime.experts.native import translated_errors
from kt_runtime.experts.packed.weight import PackedWeight
from kt_runtime.families.gguf import Held, Values
from kt_runtime.families.gguf.layout import Order
from kt_runtime.files import read_at
from kt_runtime.gguf_file import BLOCKS, open_gguf

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
        self._tensors: dict[str, tuple[int, Path, Entry]] = {}
        with contextlib.ExitStack() as opened:
            for path in files:
                descriptor, file = opened.enter_context(open_gguf(path))
                self._tensors |= {name: (descriptor, file.path, entry) for name, entry in file.tensors.items()}
            self._stack = opened.pop_all()

    def __enter__(self) -> GgufTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> Collection[str]:
        """Names of all tensors of the files."""
        return self._tensors.keys()

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor as `dtype`, rounded once from float32. Raises CheckpointError for one that is missing, can't be
        read, or holds NaN or infinity."""
        descriptor, path, entry = self._found(name)
        out = torch.empty(math.prod(entry.shape[:-1]), entry.shape[-1], dtype=dtype)
        row = 0
        for values in _rows(descriptor, path, name, entry):
            if not torch.isfinite(values).all():
                raise CheckpointError(f"{path}: tensor {name!r} holds NaN or infinity")
            out[row : row + len(values)] = values
            row += len(values)
        return out.reshape(entry.shape)

    def read_held(self, held: Held, dtype: torch.dtype) -> torch.Tensor:
        """The Hugging Face tensor. Arithmetic on the file's numbers is float32. Raises as `read`."""
        exact = dtype if held.values in (Values.SAME, Values.SPLIT_BY_HEAD) else torch.float32
        return from_parts(held, [self.read(part.name, exact) for part in held.parts]).to(dtype)

    def packed(
        self,
        parts: Sequence[Held],
        dtype: torch.dtype,
        *,
        own: Sequence[torch.Tensor | None] = (),
        columns: range | None = None,
    ) -> PackedWeight:
        """The matrices of these tensors below each other, with the blocks' own codes and scales.

        `parts`: each `is_matrix_as_it_is`. `dtype`: that of the activations. `own`: for each part the numbers of the
        wanted rows, where those after its last row are zeros; None: all rows. `columns`: the wanted columns, whole
        blocks; None: all. Raises CheckpointError for a tensor that is missing, can't be read, or has a scale that is
        NaN, infinite or above 1e30.
        """
        names = [part.parts[0].name for part in parts]
        found = [self._found(name) for name in names]
        wanted = [*own] or [None] * len(parts)
        rows = [entry.shape[0] if one is None else len(one) for (_, _, entry), one in zip(found, wanted, strict=True)]
        width = found[0][2].shape[1] if columns is None else len(columns)
        with translated_errors():
            matrix = _experts.PackedMatrix(
                [(entry.dtype, count) for (_, _, entry), count in zip(found, rows, strict=True)], width
            )
            for part, (name, held, place, one) in enumerate(zip(names, parts, found, wanted, strict=True)):
                descriptor, path, entry = place
                for first, blocks in _strips(descriptor, path, name, entry, _Wanted(held.rows, one, columns)):
                    if matrix.fill(part, entry.dtype, first, blocks) >= 0:
                        raise CheckpointError(
                            f"{path}: tensor {name!r} holds a scale that is NaN, infinite or above 1e30"
                        )
        return PackedWeight(matrix, dtype)

    def split(self, parts: Sequence[Held], dtype: torch.dtype, own: Sequence[torch.Tensor | None]) -> PackedWeight:
        """As `packed`, a rank's rows: `own` of each part, None: all. Columns of all rows are read when they are asked
        for, as long as the files are open."""
        made = self.packed(parts, dtype, own=own)
        readers = [partial(self._columns, part, dtype) for part in parts]
        return PackedWeight(made.native, dtype, readers)

    def _columns(self, part: Held, dtype: torch.dtype, which: range) -> PackedWeight:
        return self.packed([part], dtype, columns=which)

    def _found(self, name: str) -> tuple[int, Path, Entry]:
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name!r} is missing in the GGUF model")
        return self._tensors[name]


def from_parts(held: Held, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The Hugging Face tensor from the file's tensors."""
    if held.values is Values.SPLIT_BY_HEAD:
        keys, values = parts
        return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)
    whole = torch.cat([part.reshape(one.shape) for part, one in zip(parts, held.parts, strict=True)])
    if held.rows is not None:
        whole = whole[torch.tensor(held.rows).argsort()]
    if held.columns is not None:
        whole = whole[:, torch.tensor(held.columns).argsort()]
    if held.values is Values.PLUS_ONE:
        whole = whole - 1
    elif held.values is Values.DECAY:
        whole = (-whole).log()
    return whole.reshape(held.shape).contiguous()


def to_parts(held: Held, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The file's tensors, in float32 where something is computed, from the Hugging Face tensor."""
    if held.values is Values.SPLIT_BY_HEAD:
        (_, _, nope), (heads, value, latent) = (part.shape for part in held.parts)
        by_head = tensor.reshape(heads, nope + value, latent)
        return [by_head[:, :nope].transpose(1, 2), by_head[:, nope:]]
    if held.values is Values.PLUS_ONE:
        tensor = tensor.float() + 1
    elif held.values is Values.DECAY:
        tensor = -tensor.float().exp()
    if held.rows is not None:
        tensor = tensor[torch.tensor(held.rows)]
    if held.columns is not None:
        tensor = tensor[:, torch.tensor(held.columns)]
    if len(held.parts) == 1:
        return [tensor.reshape(held.parts[0].shape)]
    return list(tensor.split([part.shape[0] for part in held.parts]))


@dataclass(frozen=True)
class _Wanted:
    """The wanted part of a matrix. `order`: Hugging Face's row at each place of the file, None: the same order. `own`,
    `columns`: as in `GgufTensors.packed`."""

    order: Order | None
    own: torch.Tensor | None
    columns: range | None

    def places(self, rows: int) -> tuple[Any, int]:
        """Places in the file of the wanted rows that it has, and the number of all wanted rows, zeros included."""
        import numpy as np

        numbers = np.arange(rows) if self.own is None else self.own.numpy()
        there = numbers[numbers < rows]
        return there if self.order is None else np.argsort(self.order)[there], len(numbers)

    def part_of_row(self, kind: str, row_bytes: int) -> slice:
        """The bytes of the wanted columns."""
        if self.columns is None:
            return slice(0, row_bytes)
        per_block, block_bytes = BLOCKS[kind]
        return slice(self.columns.start // per_block * block_bytes, self.columns.stop // per_block * block_bytes)


def _strips(descriptor: int, path: Path, name: str, entry: Entry, wanted: _Wanted) -> Iterator[tuple[int, Any]]:
    """(first row, blocks uint8 [rows, bytes of a row]) of the wanted part of a matrix, in multiples of 16 rows.

    Rows have Hugging Face's order. Reads the file from the first to the last place of a strip's rows.
    """
    import numpy as np

    row_bytes = (entry.stop - entry.start) // entry.shape[0]
    places, rows = wanted.places(entry.shape[0])
    of_row = wanted.part_of_row(entry.dtype, row_bytes)
    at_once = rows if wanted.order else max(16, _STRIP_BYTES // row_bytes // 16 * 16)
    for first in range(0, rows, at_once):
        count, at = min(at_once, rows - first), places[first : first + at_once]
        blocks = np.zeros((0, row_bytes), np.uint8)
        if len(at):
            begin, end = int(at.min()), int(at.max()) + 1
            data = _read_part(descriptor, path, name, entry, begin * row_bytes, (end - begin) * row_bytes)
            blocks = np.frombuffer(data, np.uint8).reshape(end - begin, row_bytes)
            if not np.array_equal(at, np.arange(begin, end)):
                blocks = blocks[at - begin]
        if len(at) < count:
            blocks = np.concatenate([blocks, np.zeros((count - len(at), row_bytes), np.uint8)])
        yield first, np.ascontiguousarray(blocks[:, of_row])


def _read_part(descriptor: int, path: Path, name: str, entry: Entry, start: int, size: int) -> bytes:
    """`size` bytes of the tensor, from its byte `start` on."""
    data = read_at(descriptor, size, entry.start + start)
    if len(data) != size:
        raise CheckpointError(f"{path}: tensor {name!r} is truncated: the file has become shorter")
    return data


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
        data = _read_part(descriptor, path, name, entry, first * row_bytes, count * row_bytes)
        raw = np.frombuffer(data, np.uint8).reshape(count, row_bytes)
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[entry.dtype])
        yield torch.from_numpy(np.require(values, np.float32, ["C", "W"]).reshape(count, entry.shape[-1]))
