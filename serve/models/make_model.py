"""Checkpoints of real architectures with random weights, for tests, the demo and measurements.

Files are as on the hub: config.json, generation_config.json, safetensors in bf16 (sharded above `SHARD_BYTES`),
tokenizer. One tensor is in memory at a time. Preset and seed determine each tensor's bytes, in any order of writing.

Scales are chosen so that every part of the model matters to the logits: matrices have standard deviation
1/sqrt(fan-in), twice that in the router and the head; what norms multiply by varies around 1; the router's correction
bias is not zero, and attention's sinks are as large as its scores.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import family_for
from kt_runtime.files import only_files, write_directory
from kt_runtime.serve.models.checkpoint import CheckpointTensor, checkpoint_tensors
from kt_runtime.serve.models.make_tokenizer import write_tokenizer
from kt_runtime.serve.models.presets import Preset, load_preset, preset_names

SHARD_BYTES = 2 * 10**9
EMBEDDING_STD = 1.0
NORM_STD = 0.1
CORRECTION_BIAS_STD = 0.1
SINK_STD = 1.0
SHARPENED = {"gate", "router", "lm_head"}

CHECKPOINT_FILES = only_files(
    re.compile(
        r"(config|generation_config|tokenizer|tokenizer_config|model\.safetensors\.index)\.json|model.*\.safetensors"
    ),
    ["config.json"],
    "`models make`",
)

Progress = Callable[[int, int], None]


def make_model(
    preset: str | Preset, directory: Path, seed: int = 0, *, replace: bool = False, progress: Progress | None = None
) -> Path:
    """Writes the checkpoint of a made preset to `directory` atomically and returns `directory`.

    `progress(bytes_written, total_bytes)` is called after every tensor. Raises InvalidValueError for a preset whose
    weights come from the hub, and ConflictError when `directory` exists. With `replace`, an existing directory that
    holds only a checkpoint is replaced.
    """
    chosen = load_preset(preset) if isinstance(preset, str) else preset
    if not chosen.is_made:
        made = ", ".join(name for name in preset_names() if load_preset(name).is_made)
        raise InvalidValueError(
            f"preset {chosen.name!r} has real weights, {' or '.join(chosen.hub_ids)} on the hub; made here are: {made}"
        )
    if seed < 0:
        raise InvalidValueError(f"seed is {seed}; must not be negative")
    directory = Path(directory)

    def fill(temporary: Path) -> None:
        write_configs(temporary, chosen.config)
        write_tokenizer(temporary, chosen.config)
        write_weights(temporary, stored_tensors(chosen.config), seed, progress)

    write_directory(directory, fill, replace=CHECKPOINT_FILES if replace else None)
    return directory


def write_configs(directory: Path, config: Mapping[str, Any]) -> None:
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    for name, content in (("config.json", dict(config)), ("generation_config.json", ids)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def stored_tensors(config: Mapping[str, Any]) -> list[CheckpointTensor]:
    """Every tensor of the checkpoint by its published name."""
    family = family_for(config)
    tensors = checkpoint_tensors(config)
    return [msgspec.structs.replace(tensor, name=family.stored_name(tensor.name)) for tensor in tensors]


def write_weights(
    directory: Path, tensors: list[CheckpointTensor], seed: int, progress: Progress | None = None
) -> None:
    shards = list(_shards(tensors))
    total_bytes = sum(tensor.size_bytes for tensor in tensors)
    written_bytes = 0
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (directory / name).open("wb") as file:
            file.write(safetensors_header(shard))
            for tensor in shard:
                file.write(random_tensor(tensor, seed).data)
                weight_map[tensor.name] = name
                written_bytes += tensor.size_bytes
                if progress is not None:
                    progress(written_bytes, total_bytes)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def safetensors_header(tensors: list[CheckpointTensor]) -> bytes:
    """Eight bytes little-endian length, then JSON padded with spaces to a multiple of eight (safetensors format)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def random_tensor(tensor: CheckpointTensor, seed: int) -> npt.NDArray[Any]:
    """The tensor's values, float32 or bf16 as uint16. Only `tensor` and `seed` determine them.

    16 random bits choose one of 65536 quantiles of the normal distribution. This is ten times as fast as drawing and
    rounding normal numbers, and bf16 hardly resolves more.
    """
    digest = hashlib.sha256(f"{seed} {tensor.name}".encode()).digest()
    generator = np.random.PCG64(int.from_bytes(digest[:16], "little"))
    count = tensor.num_parameters
    bits = generator.random_raw(-(-count // 4)).astype("<u8", copy=False).view("<u2")[:count]
    mean = float(_is_norm(tensor) and not tensor.is_offset)
    table = _normal_table(mean, standard_deviation(tensor), tensor.dtype == "F32")
    return table[bits].reshape(tensor.shape)


@cache
def _normal_table(mean: float, deviation: float, is_float32: bool) -> npt.NDArray[Any]:
    values = (mean + deviation * _standard_quantiles()).astype(np.float32)
    return values if is_float32 else to_bf16(values)


@cache
def _standard_quantiles() -> npt.NDArray[np.float64]:
    half = [NormalDist().inv_cdf((index + 0.5) / 2**16) for index in range(2**15)]
    return np.array(half + [-value for value in reversed(half)])


def standard_deviation(tensor: CheckpointTensor) -> float:
    if tensor.name.endswith("e_score_correction_bias"):
        return CORRECTION_BIAS_STD
    if "embed_tokens" in tensor.name:
        return EMBEDDING_STD
    if _is_norm(tensor):
        return NORM_STD
    if tensor.name.endswith(".sinks"):
        return SINK_STD
    module = tensor.name.removesuffix(".weight").rpartition(".")[2]
    inputs = tensor.shape[-2] if tensor.is_transposed else tensor.shape[-1]
    return (2 if module in SHARPENED else 1) / math.sqrt(inputs)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Upper halves of float32, rounded to nearest, ties to even. For finite values."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def _is_norm(tensor: CheckpointTensor) -> bool:
    return len(tensor.shape) == 1 and "norm" in tensor.name


def _shards(tensors: list[CheckpointTensor]) -> Iterator[list[CheckpointTensor]]:
    shard: list[CheckpointTensor] = []
    shard_bytes = 0
    for tensor in tensors:
        if shard and shard_bytes + tensor.size_bytes > SHARD_BYTES:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(tensor)
        shard_bytes += tensor.size_bytes
    yield shard
