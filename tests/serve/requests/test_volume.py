"""What one request may ask for in all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from reference.request_bodies import MESSAGES, body_type_of

from kt_runtime.serve.requests.checking import parse
from kt_runtime.serve.requests.refusal import Refusal
from kt_runtime.serve.requests.volume import VolumeLimit

CONTEXT = 8192
TOP = {"return_logprob": True, "top_logprobs_num": 1024}
BY_ID = {"return_logprob": True, "token_ids_logprob": [[5] * 1000]}


def check(path: str, body: dict[str, Any]) -> None:
    VolumeLimit(CONTEXT).check(parse(json.dumps(body).encode(), body_type_of(path)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [5] * 5000, "logprob_start_len": 0, **TOP}),
        ("/generate", {"text": "word " * 5000, "logprob_start_len": 0, **TOP}),
        ("/generate", {"input_ids": [[5] * 50] * 100, "logprob_start_len": [0] * 100, **TOP}),
        ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 10**9}, **TOP}),
        ("/generate", {"input_ids": [5], "sampling_params": {"n": 100}, **TOP}),
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
        ("/v1/completions", {"prompt": [5] * 5000, "echo": True, "logprobs": 1000}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1000}),
        ("/v1/responses", {"model": "default", "input": "hello", "top_logprobs": 1000}),
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
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "n": 8}),
        ("/v1/tokenize", {"prompt": "hello"}),
    ],
)
def test_usual_requests_pass(path: str, body: dict[str, Any]) -> None:
    check(path, body)


def test_many_samples_of_long_prompts_are_refused() -> None:
    with pytest.raises(Refusal, match="64 times the context length"):
        check("/generate", {"input_ids": [[5] * 8000] * 2, "sampling_params": {"n": 64}})
