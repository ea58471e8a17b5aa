"""What one request may ask for in all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from reference.server.request_bodies import MESSAGES, body_type_of

from kt_runtime.serve.requests.checks.checking import parsed
from kt_runtime.serve.requests.checks.refusal import Refusal
from kt_runtime.serve.requests.checks.volume import VolumeLimit

CONTEXT = 8192
TOP = {"return_logprob": True, "top_logprobs_num": 1024}
TOP_20 = {"return_logprob": True, "top_logprobs_num": 20}
CHAT_TOP = {"logprobs": True, "top_logprobs": 20}
RESPONSE = {"model": "default", "input": "hello", "top_logprobs": 20, "include": ["message.output_text.logprobs"]}


def check(path: str, body: dict[str, Any], context_tokens: int = CONTEXT) -> None:
    VolumeLimit(context_tokens).check(parsed(json.dumps(body).encode(), body_type_of(path))[0])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [5] * 5000, "logprob_start_len": 0, **TOP}),
        ("/generate", {"text": "word " * 5000, "logprob_start_len": 0, **TOP}),
        ("/generate", {"input_ids": [[5] * 50] * 100, "logprob_start_len": [0] * 100, **TOP}),
        ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 10**9}, **TOP}),
        ("/generate", {"input_ids": [5], "sampling_params": {"n": 100}, **TOP}),
        ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 4096}, "stream": True, **TOP}),
        (
            "/generate",
            {
                "input_ids": [5] * 5000,
                "return_logprob": True,
                "logprob_start_len": 0,
                "token_ids_logprob": [[5] * 1000],
            },
        ),
        ("/vertex_generate", {"instances": [{"text": "word " * 5000}], "parameters": {"logprob_start_len": 0, **TOP}}),
        ("/v1/completions", {"prompt": [5] * 8000, "echo": True, "logprobs": 100, "n": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 8192, "n": 8, **CHAT_TOP}),
    ],
)
def test_millions_of_log_probabilities_are_refused(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=r"log-probabilities at each of up to \d+ tokens"):
        check(path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/generate",
            {"input_ids": [5] * 8000, "logprob_start_len": 0, "return_logprob": True, "top_logprobs_num": 20},
        ),
        ("/generate", {"input_ids": [5] * 8000, **TOP, "sampling_params": {"max_new_tokens": 64}}),
        ("/generate", {"input_ids": [[5] * 8000] * 64}),
        ("/generate", {"input_ids": [], "session_params": {"id": "s"}}),
        ("/vertex_generate", {"instances": []}),
        ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 5}),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 8, **CHAT_TOP}),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 2, "max_tokens": 8192, **CHAT_TOP}),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 64, "max_tokens": 8192, "logprobs": True}),
        ("/v1/responses", {**RESPONSE, "max_output_tokens": 4096}),
        ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 8192}, "stream": True, **TOP_20}),
        ("/v1/tokenize", {"prompt": "hello"}),
    ],
)
def test_usual_requests_pass(path: str, body: dict[str, Any]) -> None:
    check(path, body)


def test_many_samples_of_long_prompts_are_refused() -> None:
    with pytest.raises(Refusal, match="64 times the context length"):
        check("/generate", {"input_ids": [[5] * 8000] * 2, "sampling_params": {"n": 64}})


def test_a_request_without_a_limit_of_tokens_passes_on_a_model_of_any_length() -> None:
    """What is counted while it is answered (`frontend/logprob_limits.py`) is not refused for what it might be."""
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 2, **CHAT_TOP}),
        ("/v1/responses", RESPONSE),
        ("/generate", {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 64}),
    ):
        check(path, body, context_tokens=163_840)


def test_no_more_tokens_are_reckoned_than_the_kv_cache_has_room_for() -> None:
    request, _ = parsed(
        json.dumps({"messages": MESSAGES, "n": 2, "max_tokens": 163_840, **CHAT_TOP}).encode(),
        body_type_of("/v1/chat/completions"),
    )
    VolumeLimit(163_840, 16_384).check(request)
    with pytest.raises(Refusal, match="one answer may have 1048576"):
        VolumeLimit(163_840).check(request)
    with pytest.raises(Refusal, match="one answer may have 90112"):
        check("/v1/responses", {**RESPONSE, "max_output_tokens": 2**31 - 1}, context_tokens=163_840)


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1024}, 20),
        ("/v1/responses", {"model": "default", "input": "hello", "top_logprobs": 21}, 20),
        ("/v1/completions", {"prompt": "a", "logprobs": 129}, 128),
        ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 1025}, 1024),
    ],
)
def test_log_probabilities_at_each_token_are_bounded_by_what_they_cost_on_the_route(
    path: str, body: dict[str, Any], most: int
) -> None:
    with pytest.raises(Refusal, match=f"<= {most}"):
        check(path, body)


def test_tokens_that_become_text_again_are_fewer() -> None:
    body = {"text": "a", "return_logprob": True, "top_logprobs_num": 200}
    check("/generate", body)
    with pytest.raises(Refusal, match="201 log-probabilities at each token with return_text_in_logprobs"):
        check("/generate", {**body, "return_text_in_logprobs": True})
