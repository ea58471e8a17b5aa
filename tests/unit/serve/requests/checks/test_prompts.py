"""How many prompts a body holds, and lists that say something for each of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from reference.server.request_bodies import body_type_of

from kt_runtime.serve.requests.checks.checking import parsed
from kt_runtime.serve.requests.checks.prompts import check_prompts
from kt_runtime.serve.requests.checks.refusal import Refusal


def check(path: str, body: dict[str, Any]) -> None:
    check_prompts(parsed(json.dumps(body).encode(), body_type_of(path))[0])


SCORE = {"query": "q", "label_token_ids": [1]}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", {}, "either text or input_ids"),
        ("/generate", {"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ("/generate", {"input_ids": []}, "at least one entry"),
        ("/generate", {"input_ids": [[1], []]}, r"input_ids\[1\]: must have at least one entry"),
        ("/generate", {"input_ids": [1, [2]]}, r"input_ids\[1\] \[2\]: all entries must be of the kind of the first"),
        ("/generate", {"input_ids": [[1]] * 1025}, "1025 prompts; one request may have 1024"),
        ("/generate", {"text": "a", "top_logprobs_num": [5]}, "top_logprobs_num: a list of 1 for 1 request"),
        ("/generate", {"text": ["a", "b"], "lora_path": ["x"]}, "lora_path: a list of 1 for 2 request"),
        ("/generate", {"text": "a", "token_ids_logprob": [[1]]}, "token_ids_logprob: a list of 1"),
        ("/generate", {"text": "a", "token_ids_logprob": [1, [2]]}, "of the kind of the first"),
        ("/generate", {"text": ["a"] * 100, "sampling_params": {"n": 11}}, "100 prompts with n 11 are 1100 sequences"),
        ("/generate", {"text": ["a"] * 2, "sampling_params": [{"n": 1}, {"n": 2}]}, "n must be the same"),
        ("/generate", {"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "only one of json_schema"),
        ("/vertex_generate", {"instances": [{"text": "a"}, {"input_ids": [1]}]}, "each of instances"),
        ("/vertex_generate", {"instances": [{}]}, "each of instances"),
        ("/vertex_generate", {"instances": [{"text": "a"}], "parameters": {"stream": True}}, "does not stream"),
        ("/v1/completions", {"prompt": ["a", 5]}, "of the kind of the first"),
        ("/v1/completions", {"prompt": "a", "rid": ["x"]}, "rid: a list of 1"),
        ("/v1/completions", {"prompt": ["a"] * 1024, "n": 2}, "2048 sequences"),
        ("/v1/chat/completions", {"messages": [], "lora_path": ["x"]}, "lora_path: a list of 1"),
        ("/v1/detokenize", {"tokens": [5, [6]]}, "of the kind of the first"),
        ("/v1/detokenize", {"tokens": []}, "at least one entry"),
        ("/v1/score", {**SCORE, "items": [[5]]}, "both be text or both be token ids"),
        ("/v1/score", {**SCORE, "items": ["a"], "label_token_ids": [1, [2]]}, "of the kind of the first"),
    ],
)
def test_number_of_prompts_that_does_not_fit_is_refused(path: str, body: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        check(path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "top_logprobs_num": 5, "token_ids_logprob": [1, 2], "sampling_params": {"n": 128}}),
        ("/generate", {"text": ["a", "b"], "lora_path": ["x", None], "sampling_params": [{}, {}]}),
        ("/generate", {"input_ids": [[1], [2]], "token_ids_logprob": [[1], [2]], "return_logprob": [True, False]}),
        ("/generate", {"input_ids": [], "session_params": {"id": "s"}}),
        ("/v1/completions", {"prompt": [[1], [2]], "lora_path": ["x", None]}),
        ("/v1/score", {**SCORE, "items": "a"}),
    ],
)
def test_number_of_prompts_that_fits_passes(path: str, body: dict[str, Any]) -> None:
    check(path, body)
