"""The recipes that come with kt-runtime: they read without a problem, and name data that is there.

That they run is in tests/system/training/test_training_runs.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kt_runtime.serve.models.presets import configs
from kt_runtime.train.data import Preference, read_datasets
from kt_runtime.train.recipe import read_recipe

RECIPES = sorted(Path(str(configs().joinpath("recipes"))).glob("*.yaml"))

# The recipe with which users of LLaMA-Factory and KTransformers come, without model, dataset and output paths.
SEED: dict[str, Any] = {
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "template": "deepseek",
    "cutoff_len": 2048,
    "max_samples": 100000,
    "overwrite_cache": True,
    "preprocessing_num_workers": 16,
    "dataloader_num_workers": 4,
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "save_only_model": False,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
    "use_kt": True,
    "kt_optimize_rule": "examples/kt_optimize_rules/DeepSeek-V3-Chat-sft-amx-multi-gpu.yaml",
    "cpu_infer": 32,
    "chunk_size": 8192,
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_reads_and_its_data_is_there(path: Path) -> None:
    recipe, _ = read_recipe(path)
    said: list[str] = []
    rows = list(read_datasets(recipe, recipe.dataset, said.append))
    assert len(rows) >= 8 and said == []
    assert all(isinstance(row, Preference) == (recipe.stage == "dpo") for row in rows)
    assert path.read_text().startswith("### ")  # says what it is for


def test_the_seed_recipe_is_the_users_own_but_for_its_paths() -> None:
    [path] = [path for path in RECIPES if path.stem == "seed-sft"]
    keys = yaml.safe_load(path.read_text())
    for name in ("model_name_or_path", "dataset", "dataset_dir", "output_dir"):
        del keys[name]
    assert keys == SEED
