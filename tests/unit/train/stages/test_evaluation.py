"""What is held out, what evaluations report, and which one was the best."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.stages.evaluation import Best, Evaluator, split
from kt_runtime.train.stages.objective import Totals


@given(count=st.integers(2, 60), size=st.one_of(st.floats(0.01, 0.9), st.integers(1, 30)), seed=st.integers(0, 9))
def test_every_row_is_trained_on_or_held_out_once_and_in_order(count: int, size: float, seed: int) -> None:
    rows: list[Any] = list(range(count))
    try:
        train, held_out = split(rows, size, seed)
    except InvalidValueError:
        assert size >= count or size * count > count - 1
        return
    assert sorted(train + held_out) == rows and train == sorted(train) and held_out == sorted(held_out)
    assert len(held_out) == (size if size >= 1 else -(-count * size // 1)) and train
    assert split(rows, size, seed) == (train, held_out)


def test_another_seed_holds_out_other_rows() -> None:
    rows: list[Any] = list(range(100))
    assert split(rows, 10, 1)[1] != split(rows, 10, 2)[1]


def test_repeats_of_a_row_are_held_out_together_and_once() -> None:
    rows: list[Any] = [0, 1, 2, 0, 3, 1, 0]
    for seed in range(20):
        train, held_out = split(rows, 2, seed, rows)
        assert len(held_out) == len(set(held_out)) == 2 and not set(train) & set(held_out)
        assert train == [row for row in rows if row not in held_out]
    with pytest.raises(InvalidValueError, match="would hold out 4 of 4 rows"):
        split(rows, 4, 0, rows)


class Counting:
    def evaluate(self, rows: Any, batch_size: int, stop: Any) -> Totals | None:
        return None if stop() else Totals(6.0, 4, 3, 12, {"rewards/margins": 2.0})


def test_figures_are_means_and_named_by_dataset(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(compute_accuracy=True, per_device_eval_batch_size=2)
    ticks = iter(range(10))
    evaluator = Evaluator(Counting(), {"": [None] * 4}, recipe, lambda: float(next(ticks)))  # type: ignore[arg-type, list-item]
    assert evaluator.run() == {
        "eval_loss": 1.5,
        "eval_accuracy": 0.25,
        "eval_rewards/margins": 0.5,
        "eval_runtime": 1.0,
        "eval_samples_per_second": 4.0,
        "eval_steps_per_second": 2.0,
    }
    named = Evaluator(Counting(), {"a": [None], "b": [None]}, recipe)  # type: ignore[arg-type, list-item]
    figures = named.run()
    assert figures and figures["eval_a_loss"] == figures["eval_b_loss"] == 1.5
    assert named.run(lambda: True) is None


def test_the_best_checkpoint_is_found_where_the_run_was_moved_to(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    best, again = Best.of(make_recipe()), Best.of(make_recipe())
    best.judge(3, {"eval_loss": 1.0})
    best.checkpoint = str(tmp_path / "old" / "checkpoint-3")
    again.restore(best.state(), tmp_path / "new" / "checkpoint-5")
    assert again.checkpoint == str(tmp_path / "new" / "checkpoint-3")
    (tmp_path / "old" / "checkpoint-3").mkdir(parents=True)
    again.restore(best.state(), tmp_path / "new" / "checkpoint-5")
    assert again.checkpoint == best.checkpoint


def test_the_best_is_the_lowest_loss_or_the_highest_of_anything_else(make_recipe: Callable[..., Recipe]) -> None:
    best = Best.of(make_recipe(early_stopping_steps=2))
    assert [best.judge(step, {"eval_loss": loss}) for step, loss in enumerate([3.0, 2.0, 2.0])] == [True, True, False]
    again = Best.of(make_recipe(early_stopping_steps=2))
    again.restore(best.state(), Path("checkpoint-2"))
    assert not again.is_exhausted and not again.judge(4, {"eval_loss": 2.5}) and again.is_exhausted
    accuracy = Best.of(make_recipe(metric_for_best_model="accuracy"))
    assert [accuracy.judge(0, {"eval_accuracy": value}) for value in (0.5, 0.4, 0.6)] == [True, False, True]
    with pytest.raises(UnknownNameError, match=r"metric_for_best_model.*eval_acuracy.*did you mean 'eval_accuracy'"):
        Best.of(make_recipe(metric_for_best_model="acuracy")).judge(0, {"eval_accuracy": 1.0})
