"""What makes two runs the same one: what a resumed run must share with the one that was saved, and what may change."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run.inputs import Inputs

# With another value of these, the batches, the adapter or what it is trained for would be others.
FIXED = (
    *("stage", "seed", "data_seed", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("packing", "disable_shuffling", "lora_rank", "lora_target", "lora_dropout", "use_rslora", "lora_alpha"),
)
FIXED_DPO = (
    *("pref_loss", "pref_beta", "pref_ftx", "dpo_label_smoothing", "simpo_gamma", "ref_model_adapters"),
    "adapter_name_or_path",  # the reference, where ref_model_adapters names no other
    "ref_logprobs",
)
LATER = {"ref_logprobs": "twin"}  # keys of FIXED_DPO that older checkpoints lack, and what they then mean
FREE = (
    *("learning_rate", "num_train_epochs", "max_steps", "lr_scheduler_type", "lr_scheduler_kwargs"),
    *("warmup_ratio", "warmup_steps", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("loraplus_lr_ratio", "disable_gradient_checkpointing"),
)


def identity(recipe: Recipe, inputs: Inputs, fingerprint: str) -> dict[str, Any]:
    """`data`: digest of the rendered rows. `model`: fingerprint of the base weights. JSON values only."""
    keys = FIXED + (FIXED_DPO if recipe.stage == "dpo" else ())
    return {
        **{key: plain(getattr(recipe, key)) for key in keys},
        "model": fingerprint,
        "data": f"{len(inputs.train)} rows, {inputs.digest[:16]}",
    }


def settings(recipe: Recipe) -> dict[str, Any]:
    return {key: plain(getattr(recipe, key)) for key in FREE}


def all_settings(recipe: Recipe) -> dict[str, Any]:
    """Every key of the recipe with its value, for trackers' records; places and internals left out."""
    hidden = {"places", "source"}
    return {field.name: plain(getattr(recipe, field.name)) for field in fields(recipe) if field.name not in hidden}


def plain(value: Any) -> Any:
    """As JSON would give it back."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return {str(key): plain(item) for key, item in value.items()} if hasattr(value, "items") else value
