"""PEFT adapter directories: `adapter_config.json` and `adapter_model.safetensors`.

Keys are `base_model.model.NAME.lora_A.weight` and `.lora_B.weight` (the prefix may be missing); routed experts have one
pair per expert, `NAME = model.layers.L.mlp.experts.E.gate_proj`. SGLang 0.5.23 and PEFT 0.21 read all of these. Where
a family's checkpoints have names of their own (Mixtral's `block_sparse_moe.experts.E.w1`), PEFT expects these in files,
and they are written; transformers' names are read too.

`target_modules` lists projections. SGLang applies gate_proj, up_proj and down_proj to every MLP. PEFT 0.21 applies them
to transformers 5's fused experts only (`peft.utils.transformers_weight_conversion`), and would silently drop the pairs
of dense MLPs and shared experts. So `target_parameters` names those again by their weights, as
`mlp.shared_experts.gate_proj.weight`. PEFT then adapts the parameter instead of the module, with the same two tensors.

transformers' gpt-oss has fused experts that PEFT does not convert: there `target_parameters` adapt the fused parameters
(`fused/parameters.py`), and files of the family are written so, unless a pair for each expert is asked for.

A directory is opened once, and validated whole before any of it is used. Sharded files and other fused experts of PEFT
(`target_parameters` other than linears' weights) are refused by name.

KTransformers writes the routed experts that kt-kernel trained as `fused_expert_lora.safetensors` next to the two files;
rank and alpha of adapter_config.json hold for both tensor files. Keys are `layers.L.experts.{gate,up,down}_lora_{a,b}`;
`a` is [E, R, in], `b` is [E, out, R], as written by kt-kernel 0.7.2 (`kt_kernel.sft`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from kt_runtime.adapters.folding import Part, fold
from kt_runtime.adapters.fused.parameters import (
    BOTH,
    adapted_parameters,
    fused_tensors,
    is_fused,
    parameters_of,
    parts_of,
)
from kt_runtime.adapters.paths import OpenDirectory, open_directory
from kt_runtime.adapters.peft_config import MAX_CONFIG_BYTES, PeftSettings, make_config, parse_config
from kt_runtime.adapters.safetensors_file import MAX_HEADER_BYTES, Place, read_tensor_file, write_tensors
from kt_runtime.adapters.tensors import AdapterTensors, LoraPair, complete_groups
from kt_runtime.adapters.validator import check_adapter, check_shape, unknown_module
from kt_runtime.beside import pause
from kt_runtime.errors import AdapterError, InvalidValueError
from kt_runtime.families import MLP, SHARED, Family, LoraModule
from kt_runtime.files import MayReplace, write_directory

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_FUSED_FILE = "fused_expert_lora.safetensors"
_WRAPPER = ".orig_module"  # the part that KTransformers' wrappers insert into the names of adapter_model.safetensors

_REFUSED_FILES = {
    "adapter_model.safetensors.index.json": "sharded adapters are not read; save it as one adapter_model.safetensors",
}
_KEY = re.compile(r"(?P<name>.+)\.lora_(?P<letter>[AB])\.weight")
_FUSED_KEY = re.compile(
    r"layers\.(?P<layer>0|[1-9][0-9]{0,5})\.experts\.(?P<projection>gate|up|down)_lora_(?P<letter>[ab])"
)
_LAYER = re.compile(r"^model\.layers\.\d+\.")
_EXPERT_KEY = re.compile(r"(?P<parent>.+\.experts)\.(?P<expert>[0-9]{1,6})\.(?P<rest>\w+\.lora_[AB]\.weight)")
_EXPERT = re.compile(r"(?P<parent>.+\.experts)\.(?P<expert>0|[1-9][0-9]{0,5})\.(?P<projection>\w+)")


def read_peft_directory(
    path: str | os.PathLike[str],
    family: Family,
    config: Mapping[str, Any],
    max_rank: int,
    base_model: str | None = None,
) -> AdapterTensors:
    """The adapter in `path`, checked: one rank, one folded scaling, complete groups.

    `base_model` is the served model's name; an adapter made for another one gets a note, not an error. `notes` of the
    result lists all changes. Raises NotFoundError or AdapterError; the message begins with the file.
    """
    with open_directory(path) as directory:
        _check_file_names(directory)
        settings = parse_config(
            directory.read(CONFIG_FILE, MAX_CONFIG_BYTES),
            max_rank,
            str(directory.path / CONFIG_FILE),
            parameters_of(family) if family.peft_experts == "fused" else (),
        )
        where = str(directory.path / TENSOR_FILE)
        largest = largest_file(family, config, max_rank)
        header = largest_header(family, config)
        with directory.open(TENSOR_FILE, largest) as file:
            tensors = read_tensor_file(file, partial(_place, family=family), header)
        if _FUSED_FILE in directory.file_names():
            tensors = _with_kt_experts(tensors, settings, directory, largest, family, config)
            where = str(directory.path)
    if not tensors:
        raise AdapterError(f"{where}: has no LoRA tensors")
    fused = _fused_of(tensors, family)
    others = {key: tensor for key, tensor in tensors.items() if _ours(key, family) not in fused}
    parts = _parts(others, settings, family, config, where)
    parts += parts_of(fused, settings.scaling_of, family, config, where)
    adapter, filled = folded_whole(parts, _one_alpha(parts, settings), family, config, max_rank, where)
    return dataclasses.replace(adapter, notes=(*adapter.notes, *_notes(filled, settings, base_model)))


def _place(key: str, family: Family) -> Place:
    """Place of a tensor in memory: those of a layer's experts are adjacent, in the order in which `fold` stacks
    them."""
    match = _EXPERT_KEY.fullmatch(_ours(key, family))
    return (match["parent"], match["rest"], int(match["expert"])) if match else (key, "", 0)


def _fused_of(tensors: Mapping[str, torch.Tensor], family: Family) -> dict[str, torch.Tensor]:
    """The tensors of PEFT's fused form, by transformers' names, if the family's files have it."""
    names = {_ours(key, family): tensor for key, tensor in tensors.items()}
    return {key: tensor for key, tensor in names.items() if family.peft_experts == "fused" and is_fused(key)}


def _ours(key: str, family: Family) -> str:
    return family.our_name(key).removeprefix(PREFIX)


def _one_alpha(parts: list[Part], settings: PeftSettings) -> float | None:
    """lora_alpha, if all parts have the scaling and none more than the rank that go with it."""
    if settings.use_rslora or not parts:
        return None
    rank, scaling = max(part.pair.a.shape[-2] for part in parts), settings.alpha / settings.rank
    is_one = rank == settings.rank and all(part.scaling == scaling for part in parts)
    return settings.alpha if settings.is_plain or is_one else None


def folded_whole(
    parts: list[Part], alpha: float | None, family: Family, config: Mapping[str, Any], max_rank: int, where: str
) -> tuple[AdapterTensors, list[str]]:
    """The parts as one checked adapter, and the modules added to complete its groups. Raises as `check_adapter`."""
    adapter = fold(parts, alpha)
    completed = complete_groups(adapter, family, config)
    check_adapter(completed, family, config, max_rank, where)
    filled = [name for name in completed.modules if name not in adapter.modules]
    return dataclasses.replace(completed, notes=adapter.notes), filled


def write_peft_directory(
    path: Path,
    adapter: AdapterTensors,
    family: Family,
    config: Mapping[str, Any],
    *,
    max_rank: int,
    base_model: str | None = None,
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, bytes] | None = None,
    replace: MayReplace | None = None,
    private: bool = False,
    fuses_experts: bool = True,
) -> None:
    """Writes the directory `path` atomically: after a crash at any moment it is there whole, or not at all.

    `fuses_experts`: as PEFT has them, in a family whose experts it knows fused only; else a pair for each expert.
    Incomplete groups are completed with zeros. `private`: only the owner may read it. `extra`: files (an optimizer's
    state, a version's description) written and replaced together with the directory. Raises AdapterError as
    `check_adapter`; ConflictError if `path` exists, unless `replace` allows it (`files.write_directory`).
    """
    extra = extra or {}
    for name in extra:
        if name in ("", CONFIG_FILE, TENSOR_FILE) or PurePosixPath(name).name != name or name.startswith("."):
            raise InvalidValueError(
                f"extra file {name!r}: expected a plain file name of its own, without a leading dot"
            )
    completed = complete_groups(adapter, family, config) if adapter.modules else adapter
    check_adapter(completed, family, config, max_rank, str(path))
    flat, parameters = dict(completed.tensors), _dense_parameters(completed, family, config)
    doubled: list[str] = []
    if fuses_experts and family.peft_experts == "fused":
        flat = fused_tensors(completed, family, config)
        parameters += adapted_parameters(completed, family)
        doubled = [name for name in parameters if name.endswith(BOTH)]
    targets = _stored_targets(flat, family)
    settings = make_config(completed.rank, completed.alpha, targets, base_model, parameters, doubled)

    def fill(directory: Path) -> None:
        tensors = {PREFIX + family.stored_name(key): tensor for key, tensor in flat.items()}
        write_tensors(directory / TENSOR_FILE, tensors, dtype)
        (directory / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        for name, data in extra.items():
            (directory / name).write_bytes(data)

    write_directory(path, fill, replace=replace, private=private)


def _stored_targets(tensors: Iterable[str], family: Family) -> list[str]:
    """PEFT's `target_modules`: the last parts of the names in the file. Fused experts are no modules."""
    keys = (family.stored_name(key) for key in tensors if not is_fused(key))
    return sorted({key.rsplit(".", 3)[1] for key in keys})


def _dense_parameters(adapter: AdapterTensors, family: Family, config: Mapping[str, Any]) -> list[str]:
    """PEFT's `target_parameters`: the modules that PEFT would not find by `target_modules`, without layer numbers.

    Empty for a checkpoint with modules of its own: each expert is a linear there, and PEFT finds all of them. Empty too
    where PEFT has no rule that makes pairs of experts from `target_modules`: it then finds all linears by them.
    """
    if config.get("model_type") in family.foreign_model_types or family.peft_experts != "pairs":
        return []
    dense = [module.name for module in family.lora_modules(config) if module.group in (MLP, SHARED)]
    return sorted({f"{_LAYER.sub('', name)}.weight" for name in dense if name in adapter.modules})


def _check_file_names(directory: OpenDirectory) -> None:
    for name in directory.file_names():
        if name in _REFUSED_FILES:
            raise AdapterError(f"{directory.path / name}: {_REFUSED_FILES[name]}")
        if name.startswith("adapter_model") and name != TENSOR_FILE:
            raise AdapterError(
                f"{directory.path / name}: refused: it may hold pickled code, or a part only; expected {TENSOR_FILE}"
            )


def _with_kt_experts(
    tensors: Mapping[str, torch.Tensor],
    settings: PeftSettings,
    directory: OpenDirectory,
    largest: int,
    family: Family,
    config: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    where = str(directory.path / _FUSED_FILE)
    if not settings.is_plain:
        raise AdapterError(
            f"{where}: beside it, {CONFIG_FILE} has use_rslora, rank_pattern or alpha_pattern; what they mean for "
            "KTransformers' experts is not known"
        )
    known = {module.name: module for module in family.lora_modules(config)}
    header = largest_header(family, config)
    with directory.open(_FUSED_FILE, largest) as file:
        fused = read_tensor_file(file, partial(_place, family=family), header)
    experts = _per_expert_tensors(fused, known, family, where)
    others = {name.replace(_WRAPPER, ""): tensor for name, tensor in tensors.items()}
    if len(others) < len(tensors):
        raise AdapterError(f"{directory.path / TENSOR_FILE}: has modules with and without {_WRAPPER!r} in their names")
    twice = next((name for name in others if name.removeprefix(PREFIX) in experts), None)
    if twice is not None:
        raise AdapterError(f"{where}: {twice!r} is in {TENSOR_FILE} too")
    return others | experts


def _per_expert_tensors(
    tensors: Mapping[str, torch.Tensor], known: Mapping[str, LoraModule], family: Family, where: str
) -> dict[str, torch.Tensor]:
    """The same tensors as `model.layers.L.mlp.experts.E.gate_proj.lora_A.weight` and so on: views, no copies.

    `known`: the model's modules by name. Raises AdapterError for a key or shape that the file can't have.
    """
    flat: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        match = _FUSED_KEY.fullmatch(key)
        if match is None:
            raise AdapterError(f"{where}: unknown key {key!r}; expected layers.L.experts.gate_lora_a and the like")
        name = f"{family.expert_prefix(int(match['layer']))}.{match['projection']}_proj"
        if name not in known:
            raise AdapterError(f"{where}: {key!r}: layer {match['layer']} of this model has no routed experts")
        module = known[name]
        if tensor.dim() != 3 or tensor.shape[0] != module.num_experts:
            raise AdapterError(
                f"{where}: {key!r} has shape {list(tensor.shape)}; expected three dimensions, the first of "
                f"{module.num_experts} experts"
            )
        for expert, part in enumerate(tensor.unbind(0)):
            flat[f"{module.expert_name(expert)}.lora_{match['letter'].upper()}.weight"] = part
    return flat


def largest_file(family: Family, config: Mapping[str, Any], max_rank: int) -> int:
    """An upper bound in bytes: every module of the model at the largest rank in float32."""
    features = sum(
        (module.in_features + module.out_features) * max(1, module.num_experts)
        for module in family.lora_modules(config)
    )
    return features * max_rank * 4 + MAX_HEADER_BYTES + 8


def largest_header(family: Family, config: Mapping[str, Any]) -> int:
    """An upper bound in bytes: half a kilobyte for each tensor of the model, and a megabyte of metadata."""
    tensors = sum(2 * max(1, module.num_experts) for module in family.lora_modules(config))
    return min(MAX_HEADER_BYTES, (1 << 20) + 512 * tensors)


def _parts(
    tensors: Mapping[str, torch.Tensor],
    settings: PeftSettings,
    family: Family,
    config: Mapping[str, Any],
    where: str,
) -> list[Part]:
    """One part per complete pair, in the model's order. A key that is not used raises AdapterError."""
    known = {module.name: module for module in family.lora_modules(config)}
    order = {name: position for position, name in enumerate(known)}
    pairs: dict[tuple[str, int], dict[str, str]] = {}
    for key in tensors:
        pause()
        name, letter = _split(family.our_name(key), where)
        module, expert = _find(name, known, family, key, where)
        letters = pairs.setdefault((module.name, -1 if expert is None else expert), {})
        if letter in letters:
            raise AdapterError(f"{where}: {key!r} and {letters[letter]!r} are the same tensor, with and without prefix")
        letters[letter] = key
    return [
        _part(known[name], None if expert < 0 else expert, letters, tensors, settings, where)
        for (name, expert), letters in sorted(pairs.items(), key=lambda item: (order[item[0][0]], item[0][1]))
    ]


def _split(key: str, where: str) -> tuple[str, str]:
    match = _KEY.fullmatch(key)
    if match and not match["name"].endswith(".base_layer"):
        return match["name"].removeprefix(PREFIX), match["letter"]
    if match or re.search(r"\.experts\.lora_", key):
        raise AdapterError(f"{where}: {key!r} is PEFT's fused form of experts, which does not say what it adapts")
    reasons = {"magnitude": "DoRA is not supported", "embedding": "embeddings are never adapted here"}
    reason = next(
        (text for part, text in reasons.items() if part in key), "expected NAME.lora_A.weight or NAME.lora_B.weight"
    )
    raise AdapterError(f"{where}: unknown key {key!r}: {reason}")


def _find(
    name: str, known: Mapping[str, LoraModule], family: Family, key: str, where: str
) -> tuple[LoraModule, int | None]:
    module = known.get(name)
    if module is not None and not module.num_experts:
        return module, None
    if module is not None or re.search(r"\.experts$", name):
        raise AdapterError(
            f"{where}: {key!r} is a fused form of experts; expected one pair per expert, experts.E.gate_proj"
        )
    match = _EXPERT.fullmatch(name)
    stacked = known.get(f"{match['parent']}.{match['projection']}") if match else None
    if match is None or stacked is None or not stacked.num_experts:
        raise unknown_module(name, list(known), family, f"{where}: unknown key {key!r}")
    expert = int(match["expert"])
    if expert >= stacked.num_experts:
        raise AdapterError(
            f"{where}: {key!r}: there is no expert {expert}; the model has 0 to {stacked.num_experts - 1}"
        )
    return stacked, expert


def _part(
    module: LoraModule,
    expert: int | None,
    letters: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    settings: PeftSettings,
    where: str,
) -> Part:
    name = module.name if expert is None else module.expert_name(expert)
    for letter in "AB":
        if letter not in letters:
            raise AdapterError(f"{where}: '{name}.lora_{letter}.weight' is missing; its other half is there")
    in_file = _split(letters["A"], where)[0]  # patterns match this name
    rank = settings.rank_of(in_file)
    check_shape(letters["A"], tensors[letters["A"]], (rank, module.in_features), where)
    check_shape(letters["B"], tensors[letters["B"]], (module.out_features, rank), where)
    pair = LoraPair(tensors[letters["A"]], tensors[letters["B"]])
    return Part(module, expert, pair, settings.scaling_of(in_file))


def _notes(filled: list[str], settings: PeftSettings, base_model: str | None) -> list[str]:
    notes = filler_notes(filled)
    if settings.use_rslora:
        notes.append("rsLoRA: lora_alpha / sqrt(r) was folded into lora_alpha / r")
    if base_model and settings.base_model and _basename(settings.base_model) != _basename(base_model):
        notes.append(f"the adapter was made for {settings.base_model!r}, the served model is {base_model!r}")
    return notes


def filler_notes(filled: list[str]) -> list[str]:
    """The note for users about the modules that `complete_groups` added."""
    if not filled:
        return []
    shown = ", ".join(filled[:3]) + (", ..." if len(filled) > 3 else "")
    return [f"{len(filled)} modules were filled with zeros, to complete their fused group: {shown}"]


def _basename(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()
