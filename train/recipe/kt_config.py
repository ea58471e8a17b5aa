"""The `kt_config:` mapping of kt-kernel 0.7.2: 25 fields for users, with or without the prefix `kt_`.

Fields that repeat a recipe key set that key. Fields that describe the loaded experts are kept, and the command compares
them with the resident model. The others have no effect. Unknown fields are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kt_runtime.documents import shown
from kt_runtime.train.recipe.checks import (
    Check,
    mapping,
    nearest,
    number,
    one_of,
    optional,
    path,
    text,
    whole,
)
from kt_runtime.train.recipe.draft import Draft

EXPERT_FORMATS = ("bf16", "int8", "fp8", "rawint4", "mxfp4")


@dataclass(frozen=True)
class Field:
    """`key`: the recipe key that the field sets; None if it is only compared or ignored. `off`: values that turn off a
    field which is refused otherwise. `line`: what the field means, or why it has no effect."""

    check: Check
    line: str
    kind: str
    key: str | None = None
    off: tuple[Any, ...] = ()


def _same(key: str, check: Check) -> Field:
    return Field(optional(check), f"{key}, in other words", "alias", key)


def _compared(check: Check, line: str) -> Field:
    return Field(optional(check), f"compared with {line}", "alias")


def _warned(line: str, check: Check = lambda value: value) -> Field:
    return Field(check, line, "warned")


def _refused(line: str, *off: Any) -> Field:
    return Field(lambda value: value, line, "refused", off=(None, *off))


_GPU_EXPERTS = "extra experts on the GPU can't be served; leave it out"
_POOL = "the server's expert threads and memory hold"

FIELDS: dict[str, Field] = {
    "backend": _compared(text, "the resident experts' format"),
    "expert_weight_format": _compared(one_of(*EXPERT_FORMATS), "the resident experts' format"),
    "num_threads": _same("cpu_infer", whole(1)),
    "weight_path": _same("kt_weight_path", path),
    "non_expert_weight_path": _same("kt_non_expert_weight_path", path),
    "expert_checkpoint_path": _same("kt_expert_checkpoint_path", path),
    "lora_rank": _same("lora_rank", whole(1)),
    "lora_alpha": _same("lora_alpha", number(0, above=True)),
    "lora_dropout": _same("lora_dropout", number(0, 1)),
    "model_max_length": _compared(whole(1), "the resident model's context"),
    "num_gpu_experts": _compared(whole(0), "the resident placement"),
    "activation_policy": Field(optional(mapping), "cpu and gpu: retain or recompute; cpu's holds for both", "alias"),
    "train_mode": Field(
        one_of(
            "lora", why=dict.fromkeys(("full", "hybrid"), "would change weights that are shared with serving; lora")
        ),
        "lora",
        "alias",
    ),
    "tp_enabled": _warned(_POOL),
    "threadpool_count": _warned(_POOL),
    "share_cache_pool": _warned(_POOL),
    "max_cache_depth": _warned(_POOL),
    "share_backward_bb": _warned("backward reads the resident weights themselves"),
    "weight_lifecycle": _warned("the resident experts stay loaded"),
    "skip_expert_loading": _warned("the resident experts are loaded once"),
    "force_fused_expert_lora": _warned("experts' LoRA is always computed in the expert kernels"),
    "full_weight_grad": _refused("would change weights that are shared with serving; leave it out", False),
    "use_lora_experts": _refused(_GPU_EXPERTS, False),
    "lora_expert_num": _refused(_GPU_EXPERTS, 0),
    "lora_expert_intermediate_size": _refused(_GPU_EXPERTS, 0),
}
RUNTIME_ONLY = ("checkpoint_files", "sharded_metadata", "wrap_fn", "wrap_kwargs")


def apply(draft: Draft, fields: dict[str, Any] | None) -> None:
    kept: dict[str, Any] = {}
    for written_name, value in (fields or {}).items():
        name = written_name.removeprefix("kt_")
        full = f"kt_config.{written_name}"
        draft.places.setdefault(full, draft.where("kt_config"))
        draft.written[full] = value
        if f"kt_config.{name}" != full:
            draft.places[f"kt_config.{name}"] = draft.places[full]
        if name in kept:
            draft.problem(full, "is given with and without the prefix kt_")
        elif name == "enabled" and value is True:
            continue  # written by accelerate-kt itself
        elif name not in FIELDS:
            why = "kt-kernel sets it itself" if name in RUNTIME_ONLY else "kt-kernel 0.7.2 has no such field"
            draft.problem(full, f"{why}{nearest(name, list(FIELDS))}; known: {', '.join(FIELDS)}")
        else:
            kept[name] = _apply_field(draft, full, name, value)
    draft.values["kt_config"] = {name: value for name, value in kept.items() if value is not None}


def _apply_field(draft: Draft, full: str, name: str, value: Any) -> Any:
    known = FIELDS[name]
    try:
        checked = known.check(value)
    except ValueError as error:
        draft.problem(full, str(error))
        return None
    if known.kind == "refused" and value not in known.off:
        draft.problem(full, known.line)
    elif known.kind == "warned":
        draft.note(full, f"no effect: {known.line}")
    elif name == "activation_policy" and checked is not None:
        _activation_policy(draft, full, checked)
    elif known.key is not None and checked is not None:
        _set(draft, full, known.key, checked)
    return checked


def _set(draft: Draft, full: str, key: str, value: Any) -> None:
    if draft.is_written(key) and draft.values.get(key) != value:
        draft.problem(
            full, f"{key} is {shown(key, draft.written[key])} at {draft.where(key)}; leave one of the two out"
        )
        return
    draft.values[key] = value
    draft.places.setdefault(key, draft.where(full))


def _activation_policy(draft: Draft, full: str, policy: dict[str, Any]) -> None:
    words = ("retain", "recompute")
    for device, word in policy.items():
        if device not in ("cpu", "gpu") or word not in words:
            draft.problem(full, "must be a mapping of cpu and gpu to retain or recompute")
            return
    if not policy:
        return
    word = policy.get("cpu", policy.get("gpu"))
    if len(set(policy.values())) > 1:
        draft.note(full, f"there is one policy for both: {word}")
    draft.values["disable_gradient_checkpointing"] = word == "retain"
