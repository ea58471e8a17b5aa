"""Rewards of sampled answers: the built-in ones, and a function of the user's own (`reward_function`).

A reward is checked against all prompts before a run, so that a row without an answer is found before anything is
sampled. It is computed in the trainer's main thread: math-verify bounds its time by a signal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.examples import Prompt
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.recipe.checks import BUILT_IN_REWARDS

MATH_SECONDS = 5


class Reward(Protocol):
    def check(self, prompt: Prompt) -> None:
        """Raises InvalidValueError, naming the row, if no answer to this prompt could get a reward."""

    def __call__(self, completion: str, prompt: Prompt) -> float:
        """A finite number. Raises InvalidValueError."""


def reward_of(recipe: Recipe) -> Reward:
    """The recipe's reward. Raises as `UserReward` for a file."""
    assert recipe.reward is not None, "the recipe is checked"
    if recipe.reward == "exact_match":
        return ExactMatch()
    if recipe.reward in ("contains", "contains_any_case"):
        return Contains(any_case=recipe.reward == "contains_any_case")
    if recipe.reward == "regex":
        return Pattern(str(recipe.reward_pattern))
    if recipe.reward == "math":
        return Mathematics()
    from kt_runtime.train.rollouts.reward_function import UserReward

    file, _, function = recipe.reward.rpartition(":")
    return UserReward(Path(file), function)


def check_prompts(recipe: Recipe, *sets: Sequence[object]) -> None:
    """Raises InvalidValueError, naming the row, for a prompt whose answers a built-in reward can't judge. Runs no file
    of the user's: `Grpo` checks those when the run begins."""
    if recipe.stage == "grpo" and recipe.reward in BUILT_IN_REWARDS:
        check_all(reward_of(recipe), *sets)


def check_all(reward: Reward, *sets: Sequence[object]) -> None:
    for row in (row for rows in sets for row in rows):
        if isinstance(row, Prompt):
            reward.check(row)


class ExactMatch:
    """1 if the completion is the row's answer, apart from white space at its ends; else 0."""

    def check(self, prompt: Prompt) -> None:
        _answer(prompt, "exact_match")

    def __call__(self, completion: str, prompt: Prompt) -> float:
        return float(completion.strip() == _answer(prompt, "exact_match").strip())


class Contains:
    """1 if the row's answer, which must not be blank, is in the completion; else 0. `any_case`: letters are compared
    without their case, by Unicode's case folding."""

    def __init__(self, *, any_case: bool) -> None:
        self._any_case, self._name = any_case, "contains_any_case" if any_case else "contains"

    def check(self, prompt: Prompt) -> None:
        if not _answer(prompt, self._name).strip():
            raise InvalidValueError(f"{prompt.where}: the row's answer is blank, which every completion contains")

    def __call__(self, completion: str, prompt: Prompt) -> float:
        answer = _answer(prompt, self._name)
        if self._any_case:
            return float(answer.casefold() in completion.casefold())
        return float(answer in completion)


class Pattern:
    """1 if the pattern is found in the completion and its group `answer`, if any, is the row's answer; else 0."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self._compares = "answer" in self._pattern.groupindex

    def check(self, prompt: Prompt) -> None:
        if self._compares:
            _answer(prompt, "regex, whose pattern has a group named answer,")

    def __call__(self, completion: str, prompt: Prompt) -> float:
        found = self._pattern.search(completion)
        if found is None or not self._compares:
            return float(found is not None)
        return float((found["answer"] or "").strip() == _answer(prompt, "regex").strip())


class Mathematics:
    """1 if math-verify finds in the completion what equals the row's answer; else 0."""

    def __init__(self) -> None:
        import math_verify

        self._library: Any = math_verify
        self._golds: dict[str, Any] = {}

    def check(self, prompt: Prompt) -> None:
        self._gold(prompt)

    def __call__(self, completion: str, prompt: Prompt) -> float:
        found = self._library.parse(completion, parsing_timeout=MATH_SECONDS)
        return float(self._library.verify(self._gold(prompt), found, timeout_seconds=MATH_SECONDS))

    def _gold(self, prompt: Prompt) -> Any:
        answer = _answer(prompt, "math")
        if answer not in self._golds:
            # As it stands, then as LaTeX: a bare \frac12 is only read between dollars.
            gold = self._library.parse(answer) or self._library.parse(f"${answer}$")
            if all(isinstance(each, str) for each in gold):  # text that was not parsed
                raise InvalidValueError(
                    f"{prompt.where}: the answer {answer[:80]!r} is nothing that math-verify reads (reward: math)"
                )
            self._golds[answer] = gold
        return self._golds[answer]


def _answer(prompt: Prompt, reward: str) -> str:
    if prompt.answer is None:
        raise InvalidValueError(f"{prompt.where}: the row has no answer, which reward: {reward} compares with")
    return prompt.answer
