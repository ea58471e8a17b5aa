"""How many log-probabilities a request may be given, by what is asked and by what has come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch.frontend.logprob_limits import (
    MAX_LOGPROBS,
    MAX_LOGPROBS_AS_TEXT,
    MAX_RESPONSES_LOGPROBS,
    MAX_STREAMED_LOGPROBS,
    TooManyLogprobs,
    check_answer_logprobs,
    check_prompt_logprobs,
    most_entries,
)


def asked(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "return_text_in_logprobs": False,
        "stream": False,
        "sampling_params": {"max_new_tokens": 16},
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_logprobs_num": 1024}, "1,025 tokens at each of 4,000 positions of the prompt are 4,100,000"),
        ({"top_logprobs_num": 49, "return_text_in_logprobs": True}, "allowed are 100,000"),
        ({"token_ids_logprob": list(range(300))}, "301 tokens at each of 4,000 positions of the prompt"),
    ],
)
def test_more_log_probabilities_of_a_prompt_than_the_loop_can_bear_are_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check_prompt_logprobs(asked(**changes), 4000)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_logprobs_num": 20, "return_text_in_logprobs": True},
        {"top_logprobs_num": 1024, "logprob_start_len": 3900},
        {"top_logprobs_num": 1024, "logprob_start_len": -1},
        {"top_logprobs_num": 1024, "return_logprob": False},
    ],
)
def test_usual_log_probabilities_of_a_prompt_pass(changes: dict[str, Any]) -> None:
    check_prompt_logprobs(asked(**changes), 4000)


@pytest.mark.parametrize(
    ("changes", "path", "most"),
    [
        ({}, "/generate", MAX_LOGPROBS),
        ({"sampling_params": {"n": 4}}, "/generate", MAX_LOGPROBS // 4),
        ({"stream": True}, "/generate", MAX_STREAMED_LOGPROBS),
        ({"return_text_in_logprobs": True, "stream": True}, "/v1/chat/completions", MAX_LOGPROBS_AS_TEXT),
        ({"return_text_in_logprobs": True, "sampling_params": {"n": 2}}, None, MAX_LOGPROBS_AS_TEXT // 2),
        ({"return_text_in_logprobs": True}, "/v1/responses", MAX_RESPONSES_LOGPROBS),
    ],
)
def test_what_an_answer_may_have_depends_on_how_it_is_written(
    changes: dict[str, Any], path: str | None, most: int
) -> None:
    assert most_entries(asked(**changes), path) == most


def state(positions: int, prompt_positions: int = 0, **changes: Any) -> Any:
    return SimpleNamespace(
        obj=asked(**changes),
        output_token_logprobs_val=[0.0] * positions,
        input_token_logprobs_val=[0.0] * prompt_positions,
    )


def test_an_answer_ends_when_it_has_more_than_it_may_have() -> None:
    check_answer_logprobs(state(100, top_logprobs_num=9, most_logprobs=1000))
    with pytest.raises(TooManyLogprobs, match=r"101 tokens with 10 log-probabilities each; .* may have 1,000"):
        check_answer_logprobs(state(101, top_logprobs_num=9, most_logprobs=1000))


def test_a_stream_counts_what_it_sends_with_each_token() -> None:
    check_answer_logprobs(state(60, 50, most_logprobs=100))
    with pytest.raises(TooManyLogprobs):
        check_answer_logprobs(state(60, 50, most_logprobs=100, stream=True))
    check_answer_logprobs(state(60, 50, most_logprobs=100, stream=True, return_text_in_logprobs=True))
