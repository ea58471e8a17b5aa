"""Checks a whole checkpoint directory before anything is loaded: configuration, tokenizer, weights.

Of the weights only the safetensors headers are read. Every error names the file, and what this version supports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.checkpoint_file import Entry, read_header, read_json
from kt_runtime.errors import CheckpointError
from kt_runtime.families.base import Family
from kt_runtime.families.quantization import (
    METHODS,
    STORED_PARTS,
    GgufQuantization,
    Quantization,
    StoredTensor,
    quantization_of,
)
from kt_runtime.families.registry import family_for
from kt_runtime.serve.models.checkpoint import (
    CheckpointTensor,
    dense_tensors,
    expert_tensors,
    fused_expert_tensors,
)
from kt_runtime.serve.models.gguf_model import check_gguf

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".msgpack", ".h5", ".onnx")
FOREIGN_SETTINGS = ("hf_quant_config.json", "quant_model_description.json")
PLAIN = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class StoredAt:
    """A tensor of the checkpoint: its file, its name there, its entry in the file's header."""

    shard: str
    name: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class PlainTypes:
    """The dtypes of the tensors that are not quantized, as safetensors spells them; of the router's correction bias
    none, which stays as it is."""

    dense: frozenset[str]
    experts: frozenset[str]


Found = Mapping[str, StoredAt]
"""The checkpoint's tensors by transformers' names."""


def check_checkpoint(directory: Path) -> dict[str, Any]:
    """Returns the content of config.json. Raises as `checked_checkpoint`."""
    return checked_checkpoint(directory)[0]


def checked_checkpoint(directory: Path) -> tuple[dict[str, Any], PlainTypes | None]:
    """The content of config.json, and the types of the weights: None for a GGUF model.

    Raises CheckpointError for missing, truncated or foreign files, UnknownNameError for an unknown model family or
    quantization, and InvalidValueError for a config that serving and training would compute differently.
    """
    config = read_config(directory)
    check_quantization(directory, config)
    family_for(config).check(config)
    check_tokenizer(directory)
    return config, check_weights(directory, config)


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{directory}: no config.json there; a checkpoint has config.json, weights and a tokenizer"
        )
    config = read_json(path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: holds a {type(config).__name__}, expected an object")
    return config


def check_quantization(directory: Path, config: Mapping[str, Any]) -> Quantization | None:
    quantization = quantization_of(config)
    others = [name for name in FOREIGN_SETTINGS if (directory / name).is_file()]
    if others and quantization is None:
        path = directory / others[0]
        raise CheckpointError(
            f"{path}: the weights are quantized in a way that config.json does not say; "
            f"methods that can be read: {', '.join(METHODS)}{_modelopt_advice(path)}"
        )
    return quantization


def _modelopt_advice(path: Path) -> str:
    """What to do with NVFP4 of ModelOpt's older versions, which do not write it into config.json."""
    content = read_json(path)
    stated = content.get("quantization") if isinstance(content, dict) else None
    if not isinstance(stated, dict) or stated.get("quant_algo") != "NVFP4":
        return ""
    return (
        "; this one can be read once config.json has "
        '"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}'
    )


def check_tokenizer(directory: Path) -> None:
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(f"{directory}: no tokenizer; looked for {', '.join(TOKENIZER_FILES)}")


def check_weights(directory: Path, config: Mapping[str, Any]) -> PlainTypes | None:
    """The types of the weights; None for a GGUF model, whose files name a type for each tensor."""
    if isinstance(quantization_of(config), GgufQuantization):
        check_gguf(config)
        return None
    found = _found(directory, family_for(config))
    quantization = quantization_of(config)
    if quantization is None:
        _check_dtypes(directory, found)
    missing: list[str] = []
    any_quantized = False
    plain: dict[bool, set[str]] = {False: set(), True: set()}
    for tensor in _expected(config, found):
        is_quantized = quantization is not None and _is_quantized(tensor, quantization, found)
        expected = _quantized(tensor, quantization) if quantization is not None and is_quantized else _plain(tensor)
        for name, stored in expected.items():
            if name in found:
                _check_tensor(directory, found[name], stored)
            elif not stored.is_optional:
                missing.append(family_for(config).stored_name(name))
        if quantization is not None:
            any_quantized = any_quantized or is_quantized
            _check_no_other_parts(directory, tensor.name, expected, found)
        if not is_quantized and tensor.dtype != "F32" and tensor.name in found:
            plain[tensor.is_routed_expert].add(found[tensor.name].entry.dtype)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{directory}: the weights lack {', '.join(missing[:3])}{more}")
    if quantization is not None and not any_quantized:
        raise CheckpointError(
            f"{directory}: by config.json the weights are quantized ({quantization.description}), but all matrices are "
            f"{', '.join(sorted(plain[False] | plain[True]))}; if that is right, take 'quantization_config' out of it"
        )
    return PlainTypes(dense=frozenset(plain[False]), experts=frozenset(plain[True]))


def _found(directory: Path, family: Family) -> dict[str, StoredAt]:
    found: dict[str, StoredAt] = {}
    weight_map, shards = _shards(directory)
    left = dict(weight_map)
    for shard in shards:
        for name, entry in read_header(directory / shard).items():
            if left.get(name) == shard:
                del left[name]
            other = found.setdefault(family.our_name(name), StoredAt(shard, name, entry))
            if other.name != name:
                raise CheckpointError(f"{directory / shard}: {name!r} and {other.name!r} are one tensor of the model")
            if other.shard != shard:
                raise CheckpointError(
                    f"{directory / shard}: {name!r} is in {other.shard} too; files of two checkpoints are mixed"
                )
    for name, shard in left.items():
        raise CheckpointError(f"{directory / INDEX}: says that {name!r} is in {shard}, but it is not there")
    return found


def _expected(config: Mapping[str, Any], found: Found) -> Iterator[CheckpointTensor]:
    yield from dense_tensors(config)
    family = family_for(config)
    for layer in family.moe_layers(config):
        fused = fused_expert_tensors(config, layer)
        is_fused = family.fuses_experts or any(tensor.name in found for tensor in fused)
        yield from fused if is_fused else expert_tensors(config, layer)


def _is_quantized(tensor: CheckpointTensor, quantization: Quantization, found: Found) -> bool:
    """Whether the tensor is stored in `quantization`; many checkpoints leave some matrices unquantized."""
    if len(tensor.shape) == 1 or (tensor.name in found and found[tensor.name].entry.dtype in PLAIN):
        return False
    return any(name in found for name in _quantized(tensor, quantization))


def _quantized(tensor: CheckpointTensor, quantization: Quantization) -> dict[str, StoredTensor]:
    if len(tensor.shape) == 3:
        return _quantized_fused(tensor, quantization)
    module = tensor.name.removesuffix(".weight")
    try:
        stored = quantization.stored(tensor.shape)
    except CheckpointError as error:
        raise CheckpointError(f"{tensor.name!r}: {error}") from None
    return {f"{module}.{part}": entry for part, entry in stored.items()}


def _quantized_fused(tensor: CheckpointTensor, quantization: Quantization) -> dict[str, StoredTensor]:
    """Fused experts can be in fp8, each expert's blocks of 128 x 128 apart, and in MXFP4."""
    try:
        stored = quantization.stored_fused(tensor.shape[0], *tensor.matrix)
    except CheckpointError as error:
        raise CheckpointError(f"{tensor.name!r}: {error}") from None
    if stored is None:
        raise CheckpointError(
            f"{tensor.name!r}: fused experts are read in {', '.join(PLAIN)}, fp8 and mxfp4, not in "
            f"{quantization.method}"
        )
    return {tensor.name + part: entry for part, entry in stored.items()}


def _plain(tensor: CheckpointTensor) -> dict[str, StoredTensor]:
    return {tensor.name: StoredTensor(PLAIN, tensor.shape)}


def _check_tensor(directory: Path, found: StoredAt, expected: StoredTensor) -> None:
    path, name, entry = directory / found.shard, found.name, found.entry
    if not expected.has_shape(entry.shape):
        raise CheckpointError(
            f"{path}: {name!r} has shape {list(entry.shape)}, but by config.json {list(expected.shape)}"
        )
    if entry.dtype not in expected.dtypes:
        raise CheckpointError(f"{path}: {name!r} is {entry.dtype}; allowed: {', '.join(expected.dtypes)}")


def _check_no_other_parts(directory: Path, name: str, expected: Mapping[str, StoredTensor], found: Found) -> None:
    """Refuses codes, scales or zero points of a matrix that `quantization_config` says nothing of: SGLang and the
    store would read the matrix without them, or with them alone."""
    module = name.removesuffix(".weight")
    for other in (f"{module}.{part}" for part in STORED_PARTS):
        if other in found and other not in expected:
            at = found[other]
            raise CheckpointError(
                f"{directory / at.shard}: {at.name!r} is there; by config.json the matrix is stored as "
                f"{', '.join(part.rpartition('.')[2] for part in expected)}"
            )


def _check_dtypes(directory: Path, found: Found) -> None:
    others: Counter[str] = Counter()
    example = {}
    for tensor in found.values():
        if tensor.entry.dtype not in PLAIN:
            others[tensor.entry.dtype] += 1
            example[tensor.entry.dtype] = tensor.name
    if others:
        dtype, count = others.most_common(1)[0]
        raise CheckpointError(
            f"{directory}: {count} tensors are {dtype}, such as {example[dtype]!r}; without a 'quantization_config' in"
            f" config.json all must be one of {', '.join(PLAIN)}"
        )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that hold a checkpoint's weights. Raises CheckpointError."""
    return [directory / shard for shard in _shards(directory)[1]]


def _shards(directory: Path) -> tuple[dict[str, str], list[str]]:
    """(the index's tensor name → file, all files). A checkpoint of one file has no index."""
    if (directory / INDEX).is_file():
        return _indexed_shards(directory)
    if (directory / SINGLE).is_file():
        return {}, [SINGLE]
    others = sorted(path.name for path in directory.iterdir() if path.suffix in OTHER_WEIGHTS)
    if others:
        listed = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise CheckpointError(f"{directory}: the weights are in {listed}; only safetensors files are read")
    raise CheckpointError(f"{directory}: no weights; looked for {SINGLE} and {INDEX}")


def _indexed_shards(directory: Path) -> tuple[dict[str, str], list[str]]:
    path = directory / INDEX
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path}: no 'weight_map' of tensor names to files")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(f"{path}: {shard!r} is not a plain file name")
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise CheckpointError(
            f"{directory}: {len(missing)} of {len(shards)} weight files are missing: {listed};"
            " the download is incomplete"
        )
    return weight_map, shards
