"""Aliases: what each synonym of a recipe key writes into the draft, after all keys have been checked one by one.

The aliases, their allowed values and their meaning are in `configs/recipe_keys.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kt_runtime.train.recipe import kt_config
from kt_runtime.train.recipe.checks import trackers as check_trackers
from kt_runtime.train.recipe.draft import Draft


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


APPLY: dict[str, Callable[[Draft, Any], None]] = {
    "evaluation_strategy": _evaluation_strategy,
    "adapter_folder": _adapter_folder,
    "create_new_adapter": _create_new_adapter,
    "neat_packing": _neat_packing,
    "gradient_checkpointing": _gradient_checkpointing,
    "kt_cpu_activation": _kt_cpu_activation,
    "use_swanlab": _use_swanlab,
    "use_kt": _use_kt,
    "infer_backend": _infer_backend,
    "ref_model": _ref_model,
    "kt_config": kt_config.apply,
}
