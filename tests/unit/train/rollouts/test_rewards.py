"""Built-in rewards, and functions of users with everything that may go wrong in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.train.examples import Prompt
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.recipe.reward_file import check_function
from kt_runtime.train.rollouts.reward_function import UserReward
from kt_runtime.train.rollouts.rewards import check_prompts, reward_of

WHERE = "rows.json:7"


def prompt(answer: str | None = "42", **columns: Any) -> Prompt:
    return Prompt(np.array([1, 2], np.int32), "how many?", answer, columns, WHERE)


def judged(recipe: Recipe, completion: str, answer: str) -> float:
    return reward_of(recipe)(completion, prompt(answer))


@pytest.mark.parametrize(
    ("reward", "completion", "expected"),
    [
        ("contains", "it is Blue.", 1.0),
        ("contains", "it is blue.", 0.0),
        ("contains_any_case", "IT IS BLUE.", 1.0),
        ("contains_any_case", "it is red", 0.0),
    ],
)
def test_contains_looks_for_the_answer_anywhere(
    make_recipe: Callable[..., Recipe], reward: str, completion: str, expected: float
) -> None:
    judge = reward_of(make_recipe(stage="grpo", reward=reward))
    assert judge(completion, prompt("Blue")) == expected
    with pytest.raises(InvalidValueError, match="blank, which every completion contains"):
        judge.check(prompt(" "))
    with pytest.raises(InvalidValueError, match=f"no answer, which reward: {reward} compares"):
        judge.check(prompt(None))


def test_exact_match_ignores_white_space_at_the_ends(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(stage="grpo", reward="exact_match")
    assert [judged(recipe, text, "42") for text in (" 42\n", "42", "4 2", "42.")] == [1.0, 1.0, 0.0, 0.0]


def test_a_pattern_is_found_or_its_answer_compared(make_recipe: Callable[..., Recipe]) -> None:
    found = make_recipe(stage="grpo", reward="regex", reward_pattern=r"<a>\d+</a>")
    assert [judged(found, text, "x") for text in ("so <a>7</a>", "7")] == [1.0, 0.0]
    compared = make_recipe(stage="grpo", reward="regex", reward_pattern=r"<a>(?P<answer>.*?)</a>")
    assert [judged(compared, text, "42") for text in ("<a> 42 </a>", "<a>41</a>", "42")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so it is \\boxed{42}", "42", 1.0),
        ("The answer is $\\frac{1}{2}$.", "0.5", 1.0),
        ("$2x+1$", "\\frac{4x+2}{2}", 1.0),
        ("43", "42", 0.0),
        ("no idea", "42", 0.0),
    ],
)
def test_mathematics_that_is_equal_is_equal(
    make_recipe: Callable[..., Recipe], completion: str, answer: str, reward: float
) -> None:
    pytest.importorskip("math_verify")
    assert judged(make_recipe(stage="grpo", reward="math"), completion, answer) == reward


def test_a_row_that_a_reward_can_not_judge_is_named_before_anything_is_sampled(
    make_recipe: Callable[..., Recipe],
) -> None:
    exact = make_recipe(stage="grpo", reward="exact_match")
    with pytest.raises(InvalidValueError, match=r"rows\.json:7: the row has no answer, which reward: exact_match"):
        check_prompts(exact, [prompt()], [prompt(None)])
    with pytest.raises(InvalidValueError, match=r"rows\.json:7: the answer '\?!' is nothing that math-verify reads"):
        check_prompts(make_recipe(stage="grpo", reward="math"), [prompt("?!")])
    check_prompts(make_recipe(stage="grpo", reward="regex", reward_pattern="a"), [prompt(None)])


def user(tmp_path: Path, source: str, name: str = "judge") -> UserReward:
    (tmp_path / "mine.py").write_text(source)
    return UserReward(tmp_path / "mine.py", name)


def test_a_function_gets_what_it_names(tmp_path: Path) -> None:
    source = "def judge(completion, prompt, answer, level=1, *, hint): return [completion, prompt, answer, level, hint]"
    with pytest.raises(InvalidValueError, match=r"\['c', 'how many\?', '42', 3, 'h'\]"):
        user(tmp_path, source)("c", prompt(level=3, hint="h", other=9, prompt="the column"))
    takes_all = "def judge(**columns): return float(sorted(columns) == ['answer', 'completion', 'level', 'prompt'])"
    assert user(tmp_path, takes_all)("c", prompt(level=3)) == 1.0


@pytest.mark.parametrize("value", ["1", "0.5", "True", "__import__('numpy').float32(0.5)"])
def test_numbers_of_any_kind_are_rewards(tmp_path: Path, value: str) -> None:
    assert user(tmp_path, f"def judge(completion): return {value}")("c", prompt()) in (0.5, 1.0)


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "'1'", "None", "[1]", "1j"])
def test_what_is_no_finite_number_is_refused_with_the_row(tmp_path: Path, value: str) -> None:
    with pytest.raises(InvalidValueError, match=r"mine\.py:2: judge returned .* a reward is a finite number; row rows"):
        user(tmp_path, f"\ndef judge(completion): return {value}")("c", prompt())


def test_an_error_names_the_line_that_failed_and_the_row(tmp_path: Path) -> None:
    source = (
        "import json\ndef inner(text):\n    return json.loads(text)\ndef judge(completion): return inner(completion)\n"
    )
    with pytest.raises(InvalidValueError, match=r"mine\.py:3: judge raised JSONDecodeError: .*; row rows\.json:7"):
        user(tmp_path, source)("{", prompt())


def test_a_file_that_fails_when_it_runs_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"mine\.py:2: judge raised ZeroDivisionError"):
        user(tmp_path, "def judge(completion): return 1\n1 / 0\n")
    with pytest.raises(InvalidValueError, match=r"mine\.py: judge is 3, not a function"):
        user(tmp_path, "judge = 3\n")


def test_a_column_that_rows_lack_is_found_before_the_run(tmp_path: Path) -> None:
    reward = user(tmp_path, "def judge(completion, levle): return 1")
    reward.check(prompt(levle=1))
    with pytest.raises(InvalidValueError, match=r"mine\.py:1: judge asks for 'levle', which row rows\.json:7 lacks"):
        reward.check(prompt(level=1))


def test_a_function_is_looked_for_without_running_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "raise SystemExit\ntry:\n    from x import one\nexcept ImportError:\n    two = 2\nif 1:\n    def three(): ...\n"
    )
    for name in ("one", "two", "three"):
        check_function(file, name)
    with pytest.raises(UnknownNameError, match=r"mine\.py: unknown function 'thre'"):
        check_function(file, "thre")
