"""Batches and schedules: every row once per epoch, weights that make the step's loss a mean, Hugging Face's rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from kt_runtime.train import batches, schedule
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.rendering import Example


def recipe(**values: object) -> Recipe:
    defaults = {"model_name_or_path": "m", "output_dir": Path("o"), "dataset": ("d",), "dataset_dir": Path("d")}
    return Recipe(**{**defaults, **values})  # type: ignore[arg-type]


EXAMPLES = [Example([i] * (i + 2), [i] * (i + 2), [False] + [True] * (i + 1)) for i in range(7)]


def test_every_example_comes_once_per_epoch() -> None:
    settings = recipe(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    two_epochs = list(batches.steps(EXAMPLES, settings, 4))
    assert [[len(batch.lengths) for batch in step] for step in two_epochs] == [[2, 2], [2, 1], [2, 2], [2, 1]]
    for epoch in (two_epochs[:2], two_epochs[2:]):
        lengths = sorted(length for step in epoch for batch in step for length in batch.lengths)
        assert lengths == [2, 3, 4, 5, 6, 7, 8]


def test_the_order_depends_on_the_seed_alone() -> None:
    def order(seed: int) -> list[int]:
        steps = batches.steps(EXAMPLES, recipe(per_device_train_batch_size=1, seed=seed), 7)
        return [batch.lengths[0] for step in steps for batch in step]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_steps_weights_add_up_to_one_over_its_trained_tokens() -> None:
    settings = recipe(per_device_train_batch_size=3, gradient_accumulation_steps=2)
    for step in batches.steps(EXAMPLES, settings, 2):
        assert sum(float(batch.weights.sum()) for batch in step) == pytest.approx(1.0, rel=1e-6)
        assert len({float(weight) for batch in step for weight in batch.weights if weight}) == 1


@pytest.mark.parametrize(("values", "steps"), [({}, 3), ({"num_train_epochs": 1.0}, 1), ({"max_steps": 5}, 5)])
def test_the_number_of_steps(values: dict[str, object], steps: int) -> None:
    assert schedule.num_steps(recipe(**values), 7) == steps


def test_a_cosine_with_warmup_has_hugging_faces_rates() -> None:
    rates = schedule.learning_rates(recipe(learning_rate=1.0, lr_scheduler_type="cosine", warmup_ratio=0.2), steps=10)
    assert rates[:3] == [0.0, 0.5, 1.0]
    assert rates[6] == pytest.approx(0.5)
    assert rates[9] == pytest.approx(0.0380602, abs=1e-6)
