"""Graders: built-in rewards, and the reasons of those that are not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.finetuning.protocol.graders import REWARDS, read_grader, reference_of
from kt_runtime.serve.requests.checks.refusal import Refusal
from kt_runtime.train.recipe.checks import BUILT_IN_REWARDS

CHECK = {
    "type": "string_check",
    "name": "n",
    "input": "{{ sample.output_text }}",
    "reference": "={{item.a.b}}={{ item.c }}",
    "operation": "like",
}


def test_every_operation_is_a_built_in_reward_of_recipes() -> None:
    assert set(REWARDS.values()) <= set(BUILT_IN_REWARDS)
    assert read_grader(CHECK).reward == "contains"


def test_a_reference_is_filled_from_the_row() -> None:
    grader = read_grader(CHECK)
    assert reference_of(grader, {"a": {"b": "x{{item.c}}"}, "c": 1.5}) == "=x{{item.c}}=1.5"
    for row, said in (({"c": 1}, "no item.a.b"), ({"a": {"b": None}, "c": 1}, "no item.a.b"), ({"a": [1]}, "no item")):
        with pytest.raises(InvalidValueError, match=said):
            reference_of(grader, row)
    with pytest.raises(InvalidValueError, match="blank"):
        reference_of(read_grader({**CHECK, "reference": "{{item.x}}"}), {"x": " "})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"type": "python", "source": "import os"}, "the server runs no code of a request; allowed is"),
        ({"type": "score_model"}, "no model judges"),
        ({"type": "label_model"}, "no model judges"),
        ({"type": "text_similarity"}, "no built-in rewards"),
        ({"type": "multi"}, "one grader"),
        ({"type": "magic"}, "no such grader"),
        ({"type": None}, "no such grader"),
        ({"operation": "ne"}, "rewards every answer but one"),
        ({"operation": "neq"}, "operation"),
        ({"input": "{{sample.output_json.x}}"}, "input"),
        ({"input": "say {{sample.output_text}}"}, "input"),
        ({"reference": "{{sample.output_text}}"}, "names fields of the row"),
        ({"reference": "{{item.a|upper}}"}, "names fields of the row"),
        ({"reference": 5}, "reference"),
        ({"weight": 5}, "unknown field"),
    ],
)
def test_another_grader_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises((InvalidValueError, Refusal), match=re.escape(said)):
        read_grader({**CHECK, **change})
