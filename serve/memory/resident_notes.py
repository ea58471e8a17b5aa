"""Compares a recipe's placement and memory settings with the running server.

The server fixed these settings at its start, and they do not change the adapter that a recipe trains. So each
difference is one note, and never an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.quantization import QUANTIZED_WHILE_LOADING
from kt_runtime.serve.memory.placement import Placement, module_names, read_placement
from kt_runtime.serve.memory.plan import expert_formats
from kt_runtime.wire.replies import StatusReply

_FORMATS = {"rawint4": "int4", "mxfp4": "mxfp4", "bf16": "bf16", "int8": "int8", "fp8": "fp8"}
_NAME_PARTS = re.compile(r"-(amx|sft|multi-gpu(?:-([0-9]{1,2}))?)(?=[-.]|$)")


class RecipeKeys(Protocol):
    """The part of `train.recipe.Recipe` that is compared."""

    @property
    def kt_optimize_rule(self) -> Path | None: ...
    @property
    def cpu_infer(self) -> int | None: ...
    @property
    def chunk_size(self) -> int | None: ...
    @property
    def kt_weight_path(self) -> Path | None: ...
    @property
    def kt_non_expert_weight_path(self) -> Path | None: ...
    @property
    def kt_expert_checkpoint_path(self) -> Path | None: ...
    @property
    def kt_config(self) -> Mapping[str, Any]: ...
    @property
    def source(self) -> str: ...
    def where(self, key: str) -> str: ...


def compare(placement: Placement, status: StatusReply) -> list[str]:
    """One line for each difference between a rule file's placement and the resident model's."""
    lines = []
    if placement.expert_format and not _is_format(status.expert_format, placement.expert_format):
        lines.append(f"asks for {placement.expert_format} experts; the resident ones are {status.expert_format}")
    if placement.expert_isa and status.expert_isa != placement.expert_isa:
        lines.append(f"asks for {placement.expert_isa} kernels; the resident experts use {status.expert_isa}")
    if placement.num_devices > 1:
        lines.append(f"asks for {placement.num_devices} GPUs; the resident model is on one device ({status.device})")
    return lines


def placement_notes(recipe: RecipeKeys, status: StatusReply) -> list[str]:
    """Compares `kt_optimize_rule` with the resident placement. For a missing file, the file's name is interpreted.

    Raises InvalidValueError for a broken file.
    """
    rule = recipe.kt_optimize_rule
    if rule is None:
        return []
    where = f"{recipe.where('kt_optimize_rule')}: kt_optimize_rule"
    if (placement := asked_placement(recipe)) is not None:
        return [f"{where}: {line}" for line in compare(placement, status)]
    placement = placement_of_name(rule.name)
    differences = "; ".join(compare(placement, status)) or "no difference by its name"
    return [f"{where}: {rule} is not here, and placement is the resident model's: {differences}"]


def rule_file(recipe: RecipeKeys) -> Path | None:
    """The recipe's rule file, searched in the working directory, then in the recipe's directory; None: not found."""
    rule = recipe.kt_optimize_rule
    if rule is None:
        return None
    return next((path for path in (rule, Path(recipe.source).parent / rule) if path.is_file()), None)


def asked_placement(recipe: RecipeKeys, config: Mapping[str, Any] | None = None) -> Placement | None:
    """The placement of the recipe's rule file; None: there is no file.

    `config`: of the model, if a server will be started with this file. Raises InvalidValueError for a broken file and,
    with `config`, for a file that `kt-runtime serve --placement` refuses.
    """
    found = rule_file(recipe)
    if found is None:
        return None
    placement = read_placement(found, module_names(config) if config is not None else None)
    if config is not None and any(placement.pinned_experts.values()):
        raise InvalidValueError(
            f"{found}: gpu_experts needs room on the GPU, which a server that is started here does not have; start one "
            "with `kt-runtime serve --gpu-experts SIZE`"
        )
    if config is not None and placement.expert_format in QUANTIZED_WHILE_LOADING:
        try:
            expert_formats(config, placement.expert_format)
        except InvalidValueError as error:
            raise InvalidValueError(f"{found}: asks for {placement.expert_format} experts: {error}") from None
    return placement


def placement_of_name(name: str) -> Placement:
    """The placement that a rule file's name implies: -amx- (int8 in the shipped files), -multi-gpu-N (default 2)."""
    parts = {part.group(1).partition("-")[0]: part.group(2) for part in _NAME_PARTS.finditer(name)}
    devices = int(parts["multi"] or 2) if "multi" in parts else 1
    return Placement(None, devices, (), "amx" if "amx" in parts else None)


def resident_notes(recipe: RecipeKeys, status: StatusReply) -> list[str]:
    """Compares cpu_infer, chunk_size, kt_weight_path and similar keys with the resident model."""
    return list(_notes(recipe, status))


def _notes(recipe: RecipeKeys, status: StatusReply) -> Iterator[str]:
    def line(key: str, value: Any, what: str) -> str:
        return f"{recipe.where(key)}: {key}: {value}: {what}"

    if recipe.cpu_infer not in (None, status.expert_threads):
        hint = f"the server has {status.expert_threads} expert threads (`kt-runtime serve --expert-threads`)"
        yield line("cpu_infer", recipe.cpu_infer, hint)
    if recipe.chunk_size not in (None, status.chunked_prefill_tokens):
        yield line("chunk_size", recipe.chunk_size, _chunks(status))
    for key in ("kt_weight_path", "kt_non_expert_weight_path", "kt_expert_checkpoint_path"):
        path = getattr(recipe, key)
        if path is not None and not _is_within(path, Path(status.model_directory)):
            yield line(key, path, f"the resident weights are those of {status.model_directory}")
    fields = recipe.kt_config
    wanted = _wanted_format(fields)
    if wanted and not _is_format(status.expert_format, wanted):
        key = "expert_weight_format" if "expert_weight_format" in fields else "backend"
        yield line(f"kt_config.{key}", fields[key], f"the resident experts are {status.expert_format}")
    if (length := fields.get("model_max_length", 0)) > status.context_tokens:
        yield line("kt_config.model_max_length", length, f"the resident context is {status.context_tokens} tokens")
    if fields.get("num_gpu_experts"):
        hot = status.gpu_experts
        also = "none on the GPU (`serve --gpu-experts`)" if hot is None else f"{hot.slots} of them on the GPU too"
        yield line("kt_config.num_gpu_experts", fields["num_gpu_experts"], f"all experts are on the CPU, {also}")


def _chunks(status: StatusReply) -> str:
    return (
        f"the server computes {status.chunked_prefill_tokens} tokens of prompts at once, "
        f"{status.microbatch_tokens} in training (`kt-runtime serve --microbatch-tokens`)"
    )


def _wanted_format(fields: Mapping[str, Any]) -> str | None:
    """The format of `expert_weight_format`, else of `backend` (AMXBF16, AMXINT8_SFT, ...; none for auto, LLAMAFILE)."""
    if name := fields.get("expert_weight_format"):
        return _FORMATS[name]
    found = re.search(r"bf16|int8|int4|fp8|mxfp4", str(fields.get("backend", "")).casefold())
    return found.group() if found else None


def _is_format(resident: str, wanted: str) -> bool:
    """Whether a resident format is `wanted`. Resident names have groups (int4_g32) and join layers' formats by "+"."""
    return all(name.split("_")[0] == wanted for name in resident.split("+"))


def _is_within(path: Path, directory: Path) -> bool:
    resolved, root = path.resolve(), directory.resolve()
    return resolved == root or root in resolved.parents
