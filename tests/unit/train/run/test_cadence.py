"""When a run logs, saves, evaluates and publishes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run.cadence import Cadence


def at(total: int, ask: Any) -> list[int]:
    return [step for step in range(1, total + 1) if ask(step)]


def test_by_steps(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(
        logging_steps=4,
        logging_first_step=True,
        save_steps=5,
        eval_strategy="steps",
        eval_steps=3,
        publish="a",
        publish_every_steps=5,
    )
    cadence = Cadence(recipe, 10, 4)
    assert at(10, cadence.logs) == [1, 4, 8, 10]
    assert at(10, cadence.saves) == [5, 10]
    assert at(10, cadence.evaluates) == [3, 6, 9]
    assert at(10, cadence.publishes) == [5]
    assert cadence.epoch(6) == 1.5


def test_a_share_of_all_steps_is_rounded_up(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(logging_steps=0.05, save_steps=0.25, eval_strategy="steps", eval_steps=0.1)
    cadence = Cadence(recipe, 34, 4)
    assert (cadence.logging_steps, cadence.save_steps, cadence.eval_steps) == (2, 9, 4)
    assert at(34, cadence.saves) == [9, 18, 27, 34]
    assert Cadence(recipe, 3, 3).logging_steps == 1


def test_by_epochs_the_last_one_may_be_shorter(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(logging_strategy="epoch", save_strategy="epoch", eval_strategy="epoch")
    cadence = Cadence(recipe, 10, 4)
    assert at(10, cadence.logs) == at(10, cadence.saves) == at(10, cadence.evaluates) == [4, 8, 10]


def test_the_best_is_saved_when_evaluation_says_so(make_recipe: Callable[..., Recipe]) -> None:
    assert at(10, Cadence(make_recipe(save_strategy="best"), 10, 4).saves) == []


def test_never(make_recipe: Callable[..., Recipe]) -> None:
    cadence = Cadence(make_recipe(logging_strategy="no", save_strategy="no"), 10, 4)
    assert at(10, cadence.logs) == [10]
    assert at(10, cadence.saves) == at(10, cadence.evaluates) == at(10, cadence.publishes) == []
