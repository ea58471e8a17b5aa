"""Tokens of a request with a client's key: what is taken before the prompt is computed, and what answers use."""

from __future__ import annotations

import contextvars
import copy
from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch.frontend.overload import client_request, note_answers, take_tokens


class Counting:
    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []
        self.answers: list[tuple[str, int]] = []

    def take(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        self.taken.append((num_prompt_tokens, num_new_tokens))

    def answered(self, sequence: str, num_tokens: int) -> None:
        self.answers.append((sequence, num_tokens))


def taken(sampling: dict[str, Any] | None, counting: Counting | None) -> Any:
    """SGLang's request of ten tokens, where sequences may have a hundred."""
    request = SimpleNamespace(sampling_params=sampling)

    def run() -> None:
        client_request.set(counting)
        take_tokens(request, 10, 100)

    contextvars.copy_context().run(run)
    return request


@pytest.mark.parametrize(
    ("sampling", "most"),
    [
        (None, 90),
        ({}, 90),  # 128, which does not fit
        ({"max_new_tokens": 7}, 7),
        ({"max_new_tokens": 7, "n": 3}, 21),
        ({"max_new_tokens": None}, 90),  # a chat without a number
        ({"max_new_tokens": 500}, 90),
    ],
)
def test_a_prompt_takes_its_tokens_and_the_most_that_its_answers_can_have(sampling: Any, most: int) -> None:
    counting = Counting()
    taken(sampling, counting)
    assert counting.taken == [(10, most)]


def test_answers_of_copies_are_the_clients_too_and_others_are_nobodys() -> None:
    counting = Counting()
    request, other = taken({}, counting), taken({}, None)
    states = {
        "a": SimpleNamespace(obj=request),
        "b": SimpleNamespace(obj=copy.copy(request)),
        "c": SimpleNamespace(obj=other),
    }
    note_answers(states, ["a", "c", "b", "gone"], [3, 4, 5, 6])
    note_answers(states, ["a"], ())  # a message without counts
    assert counting.answers == [("a", 3), ("b", 5)]
