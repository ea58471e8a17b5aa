"""Aliases: keys that are synonyms of a recipe key, or that are compared with the resident model.

Each has a check, and a function that writes its value into the draft after all keys have been checked one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kt_runtime.train.recipe import kt_config
from kt_runtime.train.recipe.checks import Check, mapping, one_of, optional, text, truth
from kt_runtime.train.recipe.checks import trackers as check_trackers
from kt_runtime.train.recipe.draft import Draft


@dataclass(frozen=True)
class Alias:
    check: Check
    apply: Callable[[Draft, Any], None]
    line: str


def _evaluation_strategy(draft: Draft, value: Any) -> None:
    if draft.get("eval_strategy") != value and draft.is_written("eval_strategy"):
        draft.problem("evaluation_strategy", f"is the old name of eval_strategy, at {draft.where('eval_strategy')}")
    draft.values["eval_strategy"] = value
    draft.places.setdefault("eval_strategy", draft.where("evaluation_strategy"))


def _adapter_folder(draft: Draft, value: Any) -> None:
    adapter = draft.values.get("adapter_name_or_path")
    if value is not None and adapter is not None:
        draft.values["adapter_name_or_path"] = adapter / value
    elif value is not None:
        draft.problem("adapter_folder", "is a folder of adapter_name_or_path, which is missing")


def _create_new_adapter(draft: Draft, value: Any) -> None:
    if value and draft.values.get("adapter_name_or_path") is not None:
        where = draft.where("adapter_name_or_path")
        draft.problem(
            "create_new_adapter", f"the adapter at {where} would be merged into shared weights; leave one out"
        )


def _neat_packing(draft: Draft, value: Any) -> None:
    if value and draft.written.get("packing") is False:
        draft.problem("neat_packing", f"packing is false at {draft.where('packing')}")
    if value:
        draft.values["packing"] = True
        draft.places.setdefault("packing", draft.where("neat_packing"))


def _gradient_checkpointing(draft: Draft, value: Any) -> None:
    """False is transformers' default and has no effect in LLaMA-Factory, whose own key controls checkpointing."""
    if value and draft.values.get("disable_gradient_checkpointing"):
        where = draft.where("disable_gradient_checkpointing")
        draft.problem("gradient_checkpointing", f"disable_gradient_checkpointing is true at {where}")


def _kt_cpu_activation(draft: Draft, value: Any) -> None:
    """As in LLaMA-Factory, overrides disable_gradient_checkpointing; recompute conflicts with it being true."""
    if value == "recompute" and draft.values.get("disable_gradient_checkpointing"):
        where = draft.where("disable_gradient_checkpointing")
        draft.problem(
            "kt_cpu_activation", f"disable_gradient_checkpointing is true at {where}; retain, or leave one out"
        )
    elif value is not None:
        draft.values["disable_gradient_checkpointing"] = value == "retain"


def _use_swanlab(draft: Draft, value: Any) -> None:
    listed = draft.values.get("report_to", ())
    if value and "swanlab" not in listed:
        try:
            draft.values["report_to"] = (*listed, *check_trackers("swanlab"))
        except ValueError as error:
            draft.problem("use_swanlab", str(error))


def _use_kt(draft: Draft, value: Any) -> None:
    if not value:
        draft.note("use_kt", "the experts are kt-runtime's own in any case")


def _infer_backend(draft: Draft, value: Any) -> None:
    if value != "huggingface":
        draft.note("infer_backend", "SGLang answers in any case")


def _ref_model(draft: Draft, value: Any) -> None:
    if value is not None and value != draft.values.get("model_name_or_path"):
        draft.problem(
            "ref_model",
            "the reference is the resident model with the adapter off: leave it out, or name a second adapter with "
            "ref_model_adapters",
        )


ALIASES: dict[str, Alias] = {
    "evaluation_strategy": Alias(one_of("no", "steps", "epoch"), _evaluation_strategy, "the old name of eval_strategy"),
    "adapter_folder": Alias(optional(text), _adapter_folder, "joined to adapter_name_or_path"),
    "create_new_adapter": Alias(optional(truth), _create_new_adapter, "refused together with adapter_name_or_path"),
    "neat_packing": Alias(optional(truth), _neat_packing, "true: packing, which is always neat"),
    "gradient_checkpointing": Alias(optional(truth), _gradient_checkpointing, "true: recompute, which is the default"),
    "kt_cpu_activation": Alias(
        optional(one_of("retain", "recompute")), _kt_cpu_activation, "goes before disable_gradient_checkpointing"
    ),
    "use_swanlab": Alias(optional(truth), _use_swanlab, "true: report_to swanlab"),
    "use_kt": Alias(optional(truth), _use_kt, "implied"),
    "infer_backend": Alias(
        one_of("huggingface", "vllm", "sglang", "ktransformers"), _infer_backend, "SGLang answers in any case"
    ),
    "ref_model": Alias(optional(text), _ref_model, "null, or the resident model"),
    "kt_config": Alias(optional(mapping), kt_config.apply, "a mapping; its fields are listed below"),
}
