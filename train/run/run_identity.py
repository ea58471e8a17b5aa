"""The identity of a run: what a resumed run must share with the saved one, and what may change."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run.inputs import Inputs

# A change of these would change the batches, the adapter or its objective.
FIXED = (
    *("stage", "seed", "data_seed", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("packing", "disable_shuffling", "lora_rank", "lora_target", "lora_dropout", "use_rslora", "lora_alpha"),
)
FIXED_DPO = (
    *("pref_loss", "pref_beta", "pref_ftx", "dpo_label_smoothing", "simpo_gamma", "ref_model_adapters"),
    "adapter_name_or_path",  # the reference, if ref_model_adapters is not given
    "ref_logprobs",
)
FIXED_GRPO = (
    *("reward", "reward_pattern", "num_generations", "rollout_batch_size", "steps_per_rollout", "async_rollouts"),
    *("advantage_estimator", "policy_loss", "clip_low", "clip_high", "dro_beta", "kl_coef", "ref_model_adapters"),
    "routing_replay",
    *("adapter_name_or_path", "temperature", "top_p", "top_k", "max_new_tokens"),
)
# Keys that older checkpoints lack, with the value that they imply.
LATER = {"ref_logprobs": "twin", "routing_replay": "off"}
FREE = (
    *("learning_rate", "num_train_epochs", "max_steps", "lr_scheduler_type", "lr_scheduler_kwargs"),
    *("warmup_ratio", "warmup_steps", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("loraplus_lr_ratio", "disable_gradient_checkpointing"),
)


def identity(recipe: Recipe, inputs: Inputs, fingerprint: str) -> dict[str, Any]:
    """`data`: digest of the rendered rows. `model`: fingerprint of the base weights. JSON values only."""
    keys = FIXED + {"dpo": FIXED_DPO, "grpo": FIXED_GRPO}.get(recipe.stage, ())
    return {
        **{key: plain(getattr(recipe, key)) for key in keys},
        "model": fingerprint,
        "data": f"{len(inputs.train)} rows, {inputs.digest[:16]}",
    }


def settings(recipe: Recipe) -> dict[str, Any]:
    return {key: plain(getattr(recipe, key)) for key in FREE}


def all_settings(recipe: Recipe) -> dict[str, Any]:
    """Every key of the recipe with its value, for trackers' records, without places and internals."""
    hidden = {"places", "source"}
    return {field.name: plain(getattr(recipe, field.name)) for field in fields(recipe) if field.name not in hidden}


def plain(value: Any) -> Any:
    """The value after a round trip through JSON."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return {str(key): plain(item) for key, item in value.items()} if hasattr(value, "items") else value
