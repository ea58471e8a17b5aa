"""The results of a finished run in its output directory, besides its log: the adapter, the tokenizer, a README."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kt_runtime.adapters import Reader, readers
from kt_runtime.files import write_file, write_json
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run.checkpoints import ADAPTER_FILES, copy_file

ALL_RESULTS_FILE = "all_results.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_SHOWN_SETTINGS = (
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "lr_scheduler_type",
    "num_train_epochs",
    "max_steps",
    "seed",
    "lora_rank",
    "lora_target",
)


def add_results(directory: Path, name: str, results: Mapping[str, Any]) -> None:
    """Writes the file `name`, and adds the results to `all_results.json`; replaces unreadable content there."""
    write_json(directory / name, dict(results))
    path = directory / ALL_RESULTS_FILE
    try:
        before = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        before = {}
    write_json(path, {**(before if isinstance(before, dict) else {}), **results})


def write_results(recipe: Recipe, adapter: Path, model_directory: Path, results: Mapping[str, Any]) -> list[Reader]:
    """Copies the adapter from the directory `adapter` and the tokenizer from the model's, and writes README.md.

    Returns how much of the adapter each program loads, as listed in README.md.
    """
    for name in ADAPTER_FILES:
        copy_file(adapter / name, recipe.output_dir / name)
    for name in TOKENIZER_FILES:
        if (model_directory / name).is_file():
            copy_file(model_directory / name, recipe.output_dir / name)
    loaded = readers(recipe.output_dir, json.loads((model_directory / "config.json").read_bytes()))
    write_file(recipe.output_dir / "README.md", model_card(recipe, results, loaded).encode())
    return loaded


def model_card(recipe: Recipe, results: Mapping[str, Any], loaded: Sequence[Reader]) -> str:
    """Hugging Face's model card: the hub's front matter, how much each program loads, how the adapter was trained."""
    settings = "\n".join(f"- {name}: {_shown(getattr(recipe, name))}" for name in _SHOWN_SETTINGS)
    figures = "\n".join(f"- {name}: {value}" for name, value in results.items())
    programs = "\n".join(
        f"| {it.program} | {it.num_loaded:,} of {it.num_parameters:,} | {it.remark} |" for it in loaded
    )
    method = recipe.stage.upper()
    loss = f" ({recipe.pref_loss}, beta {recipe.pref_beta:g})" if recipe.stage == "dpo" else ""
    if recipe.stage == "grpo":
        loss = f" ({recipe.advantage_estimator}, {recipe.policy_loss}, reward {recipe.reward})"
    return f"""---
library_name: peft
base_model: {recipe.model_name_or_path}
tags:
- lora
- kt-runtime
model-index:
- name: {recipe.output_dir.name}
  results: []
---

# {recipe.output_dir.name}

A LoRA adapter of {recipe.model_name_or_path}, trained by {method}{loss} on {", ".join(recipe.dataset)} with kt-runtime.

## Who loads how much of it

| program | parameters | |
|---|---|---|
{programs}

With transformers 4, whose experts are linears, take `target_parameters` out of `adapter_config.json` first.

## Training

{settings}

## Results

{figures}
"""


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
