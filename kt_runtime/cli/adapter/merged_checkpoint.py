"""A Hugging Face checkpoint with an adapter merged into it, written tensor by tensor.

Every tensor of the base keeps its name: adapted matrices are merged, all others are copied. Of a model that reads
images too, the language model alone is written, with a text model's names (`families/wrapped.py`). A quantized base is
dequantized, and the whole checkpoint becomes plain (bf16, no quantization_config). The headers alone determine each
tensor's place before the first tensor is read, so one matrix is in memory at a time, and a lack of disk space is
reported at once. The directory appears only when it is complete.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kt_runtime.adapters import AdapterTensors
from kt_runtime.adapters.merge import Merger
from kt_runtime.checkpoint_file import read_header
from kt_runtime.cli.adapter.export_record import RECORD_FILE, record_of
from kt_runtime.errors import CheckpointError, ConflictError, InvalidValueError
from kt_runtime.experts.dequantize import CODES, PARTS, plain_tensors
from kt_runtime.families import family_for
from kt_runtime.families.naming import without_wrapper
from kt_runtime.families.quantization import CONFIG_KEYS, FUSED_MXFP4, GgufQuantization, quantization_of
from kt_runtime.families.wrapped import is_left_out
from kt_runtime.files import write_directory
from kt_runtime.serve.memory.plan import format_bytes
from kt_runtime.serve.models.checkpoint_files import (
    FOREIGN_SETTINGS,
    INDEX,
    OTHER_WEIGHTS,
    PLAIN,
    check_checkpoint,
    weight_files,
)

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_RESERVE_BYTES = 1 << 26  # configs, tokenizer, headers
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Place:
    """A tensor's place in the output: `offset` in bytes from the start of the data of file number `shard`.

    `dtype`: safetensors' name.
    """

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    shard: int = 0
    offset: int = 0


def write_merged(
    base: Path,
    adapter: AdapterTensors,
    path: Path,
    *,
    shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> int:
    """Writes the new directory `path`; returns the bytes of its tensors.

    `adapter` must have been checked against the base's config. `dtype`: float32 widens every tensor; None keeps the
    base's dtypes, and means bfloat16 for a quantized base. bfloat16 also replaces float16 (norms and embeddings of AWQ
    and GPTQ), with the same rounding as in a server that computes in bfloat16. Raises NumericsError for a value out of
    its dtype's range, CheckpointError for a broken base, ConflictError when `path` exists or the disk is too small.
    """
    config = check_checkpoint(base)
    quantization = quantization_of(config)
    if isinstance(quantization, GgufQuantization):
        raise CheckpointError(
            f"{base}: is a GGUF model, into which no adapter is merged; export the adapter as --format gguf, which "
            "llama.cpp loads beside the model, or as peft"
        )
    if quantization is not None and quantization.method == FUSED_MXFP4:
        raise CheckpointError(
            f"{base}: its experts are in MXFP4, into which no adapter is merged; export the adapter as peft, and load "
            "it beside the model, or merge it into a bfloat16 checkpoint of the model, as transformers writes it"
        )
    if dtype is None and quantization is not None:
        dtype = torch.bfloat16
    files = weight_files(base)
    places = plan(files, dtype, shard_bytes)
    total_bytes = sum(place.num_bytes for place in places.values())
    _check_disk(path, total_bytes + _RESERVE_BYTES)
    family = family_for(config)
    merger = Merger(adapter, family.expert_mlp(config))
    zero_offset = quantization.stored_zero_offset if quantization is not None else 1
    tensors = plain_tensors(
        [str(file) for file in files],
        torch.float32,
        lambda name: not is_left_out(name),
        gptq_zero_offset=zero_offset,
    )

    def fill(directory: Path) -> None:
        _copy_others(base, directory, config, dtype)
        named = ((without_wrapper(name), family.our_name(name), tensor) for name, tensor in tensors)
        _write_tensors(directory, places, named, merger, progress)
        if merger.left:
            raise CheckpointError(f"{base}: has no {min(merger.left)!r}, which the adapter changes")
        (directory / RECORD_FILE).write_bytes(record_of(entry.name for entry in directory.iterdir()))

    write_directory(path, fill)
    return total_bytes


def plan(files: list[Path], dtype: torch.dtype | None, shard_bytes: int) -> dict[str, Place]:
    """Every tensor's place, in the order of the files. A shard exceeds `shard_bytes` only if it has a single tensor."""
    if shard_bytes < 1:
        raise InvalidValueError(f"shard size is {shard_bytes} bytes; expected a positive number")
    places: dict[str, Place] = {}
    shard = offset = 0
    for stored, entry in _plain_entries(files):
        if is_left_out(stored):
            continue
        name = without_wrapper(stored)
        if dtype == torch.float32 and entry.dtype in PLAIN:
            entry = replace(entry, dtype="F32", num_bytes=math.prod(entry.shape) * 4)
        elif dtype == torch.bfloat16 and entry.dtype == "F16":
            entry = replace(entry, dtype="BF16")
        if offset and offset + entry.num_bytes > shard_bytes:
            shard, offset = shard + 1, 0
        places[name] = replace(entry, shard=shard, offset=offset)
        offset += entry.num_bytes
    return places


def _plain_entries(files: list[Path]) -> Iterator[tuple[str, Place]]:
    """Name and type of each tensor from `plain_tensors`, BF16 for quantized ones; `shard` and `offset` are not set."""
    headers = {file: read_header(file) for file in files}
    where = {name: file for file, header in headers.items() for name in header}
    for file, header in headers.items():
        for name, entry in header.items():
            module, _, last = name.rpartition(".")
            is_part = any(last in parts and f"{module}.{codes}" in where for codes, parts in PARTS.items())
            if is_part or where[name] != file:
                continue
            beside = {part: f"{module}.{part}" for part in PARTS.get(last, ()) if f"{module}.{part}" in where}
            if not beside and (entry.dtype in PLAIN or not name.endswith(CODES)):
                yield name, Place(entry.dtype, entry.shape, entry.stop - entry.start)
            else:
                shapes = {part: headers[where[other]][other].shape for part, other in beside.items()}
                shape = _dequantized_shape(name, entry.shape, shapes, where)
                yield f"{module}.weight", Place("BF16", shape, math.prod(shape) * 2)


def _dequantized_shape(
    name: str, codes: tuple[int, ...], beside: Mapping[str, tuple[int, ...]], where: Mapping[str, Path]
) -> tuple[int, ...]:
    """[out, in] of a quantized matrix, from the shapes of its tensors (`kt_runtime.families.quantization`)."""
    if "weight_shape" in beside:
        shape = f"{name.rpartition('.')[0]}.weight_shape"
        with safe_open(str(where[shape]), framework="pt", device="cpu") as opened:
            return tuple(int(size) for size in opened.get_tensor(shape))
    if "scales" not in beside or "qzeros" not in beside:
        return codes
    rows = beside["scales"][1]
    codes_in_word = -(-rows // beside["qzeros"][1])
    return rows, codes[0] * codes_in_word if codes[1] == rows else codes[0]


def _check_disk(path: Path, needed_bytes: int) -> None:
    existing = next(parent for parent in [path, *path.absolute().parents] if parent.exists())
    if path.exists():
        raise ConflictError(f"{path} exists already; choose another name")
    free_bytes = shutil.disk_usage(existing).free
    if needed_bytes > free_bytes:
        raise ConflictError(
            f"{path}: the checkpoint takes {format_bytes(needed_bytes)}, the disk has {format_bytes(free_bytes)} free"
        )


def _copy_others(base: Path, directory: Path, config: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """Writes config.json without quantization; copies tokenizer, generation_config.json and all other non-weights."""
    skipped = {"config.json", INDEX, RECORD_FILE, *FOREIGN_SETTINGS}
    for entry in sorted(base.iterdir()):
        is_weight = entry.suffix in (".safetensors", *OTHER_WEIGHTS)
        if entry.is_file() and not is_weight and entry.name not in skipped and not entry.name.startswith("."):
            shutil.copyfile(entry, directory / entry.name)  # follows links, since snapshots in the hub cache are links
    changed = {key: value for key, value in config.items() if key not in CONFIG_KEYS}
    if dtype is not None or len(changed) < len(config):
        key = "torch_dtype" if "torch_dtype" in changed else "dtype"
        changed[key] = str(dtype or torch.bfloat16).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tensors(
    directory: Path,
    places: Mapping[str, Place],
    tensors: Iterator[tuple[str, str, torch.Tensor]],
    merger: Merger,
    progress: Progress | None,
) -> None:
    """`tensors`: name in the file, transformers' name, values."""
    total_bytes, done_bytes = sum(place.num_bytes for place in places.values()), 0
    written: set[str] = set()
    with _Shards(directory, places) as shards:
        for name, ours, tensor in tensors:
            shards.write(places[name], _converted(ours, tensor, places[name], merger))
            written.add(name)
            done_bytes += places[name].num_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)
    assert written == places.keys(), sorted(places.keys() ^ written)[:3]
    if len(shards.names) > 1:
        index = {
            "metadata": {"total_size": total_bytes},
            "weight_map": {name: shards.names[place.shard] for name, place in places.items()},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


class _Shards:
    """The output files. All headers are written first; then one file is open at a time."""

    def __init__(self, directory: Path, places: Mapping[str, Place]) -> None:
        count = max((place.shard for place in places.values()), default=0) + 1
        self.names = ["model.safetensors"]
        if count > 1:
            self.names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        self._paths = [directory / name for name in self.names]
        self._starts = [path.write_bytes(_header(places, shard)) for shard, path in enumerate(self._paths)]
        self._shard = 0
        self._file = self._paths[0].open("r+b")

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, place: Place, tensor: torch.Tensor) -> None:
        if place.shard != self._shard:
            self._file.close()
            self._shard, self._file = place.shard, self._paths[place.shard].open("r+b")
        self._file.seek(self._starts[place.shard] + place.offset)
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _converted(name: str, tensor: torch.Tensor, place: Place, merger: Merger) -> torch.Tensor:
    stored = merger.merged(name, tensor, _TORCH[place.dtype]) if place.dtype in _TORCH else tensor
    if tuple(stored.shape) != place.shape or stored.nbytes != place.num_bytes:
        raise CheckpointError(f"{name!r} has shape {list(stored.shape)}, but by its header {list(place.shape)}")
    return stored


def _header(places: Mapping[str, Place], shard: int) -> bytes:
    """Eight bytes of length, then JSON padded with spaces to a multiple of eight (safetensors format)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, place in places.items():
        if place.shard == shard:
            offsets = [place.offset, place.offset + place.num_bytes]
            header[name] = {"dtype": place.dtype, "shape": place.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
