"""Recipes, rows and a display for training over a resident that counts (reference/resident/counting_resident.py)."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.resident.counting_resident import CountingResident, Lines

from kt_runtime.serve.models.presets import load_preset
from kt_runtime.train.examples import Example, Pair
from kt_runtime.train.recipe import Recipe


@pytest.fixture
def resident(tmp_path: Path) -> CountingResident:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").write_text(json.dumps(load_preset("tiny-deepseek-v3").config))
    return CountingResident(model)


@pytest.fixture
def display() -> Lines:
    return Lines()


@pytest.fixture
def make_recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe of 12 steps over 6 rows (2 a step, 3 steps an epoch), logged at every step."""

    def make(**keys: Any) -> Recipe:
        values: dict[str, Any] = {
            "model_name_or_path": "tiny",
            "dataset": ("d",),
            "do_train": True,
            "output_dir": tmp_path / "out",
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 4.0,
            "learning_rate": 0.01,
            "logging_steps": 1,
        }
        return Recipe(**{**values, **keys})

    return make


@pytest.fixture
def examples() -> list[Example]:
    generator = np.random.default_rng(3)
    return [Example.of(generator.integers(3, 90, 6 + row), [False] * 3 + [True] * (3 + row)) for row in range(6)]


@pytest.fixture
def pairs(examples: list[Example]) -> list[Pair]:
    return [Pair(first, second) for first, second in zip(examples, reversed(examples), strict=True)]


@pytest.fixture
def interrupt() -> Callable[[], None]:
    return lambda: signal.raise_signal(signal.SIGINT)
