"""Groups of answers over HTTP: what is asked, what comes back, what is no answer."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from reference.server.fake_server import Answer, fake_server

from kt_runtime.errors import InvalidValueError, NumericsError, RuntimeFault
from kt_runtime.train.rollouts.sampling import SHARED_TOKENS, Asked, HttpSampler

SAMPLING = {"temperature": 1.0, "max_new_tokens": 4}


def answered(logprobs: list[float], ids: list[int], end: str = "stop") -> dict[str, Any]:
    pairs = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
    return {"text": "text", "meta_info": {"finish_reason": {"type": end}, "output_token_logprobs": pairs}}


def reply(path: str, body: Any, number: int) -> Answer:
    if not isinstance(body["input_ids"][0], list):
        return 200, answered([], [])
    ends = ["stop", "length"]
    return 200, [
        answered([-0.5, -1.0], [7, settings.get("sampling_seed", 0) % 100], ends[place % 2])
        for place, settings in enumerate(body["sampling_params"])
    ]


def test_a_group_is_one_request_with_a_seed_for_each_answer() -> None:
    with fake_server(reply) as fake:
        found = HttpSampler(fake.url, None, SAMPLING).sample(
            "mine", [Asked([5, 6], [11, 12], "a"), Asked([8], [13], "b")]
        )
    bodies = sorted((body for _, body in fake.requests), key=lambda body: str(body["input_ids"]))
    assert [body["input_ids"] for body in bodies] == [[[5, 6], [5, 6]], [[8]]]
    assert bodies[0]["sampling_params"] == [{**SAMPLING, "sampling_seed": 11}, {**SAMPLING, "sampling_seed": 12}]
    assert all(body["return_logprob"] and body["lora_path"] == "mine" for body in bodies)
    assert [[each.tokens.tolist() for each in group] for group in found] == [[[7, 11], [7, 12]], [[7, 13]]]
    assert found[0][0].logprobs.dtype == np.float32 and found[0][0].logprobs.tolist() == [-0.5, -1.0]
    assert [each.has_ended for each in found[0]] == [True, False]


def test_a_prompt_of_a_page_is_computed_before_its_group_asks_for_it() -> None:
    long = list(range(3, 3 + SHARED_TOKENS))
    with fake_server(reply) as fake:
        HttpSampler(fake.url, None, SAMPLING).sample("mine", [Asked(long, [1, 2], "a")])
    first, group = [body for _, body in fake.requests]
    assert first["input_ids"] == long and first["sampling_params"]["max_new_tokens"] == 0
    assert group["input_ids"] == [long, long]


def test_without_seeds_the_likeliest_tokens_are_asked_for() -> None:
    with fake_server(reply) as fake:
        [[answer]] = HttpSampler(fake.url, None, SAMPLING).sample("mine", [Asked([5], [], "a")])
    [(_, body)] = fake.requests
    assert body["sampling_params"] == [{"temperature": 0.0, "max_new_tokens": 4, "top_p": 1.0, "top_k": -1}]
    assert answer.tokens.tolist() == [7, 0]


@pytest.mark.parametrize(
    ("result", "error", "said"),
    [
        ((400, {"error": {"message": "no such adapter"}}), InvalidValueError, "row 3: .*HTTP 400: no such adapter"),
        ((200, []), RuntimeFault, "row 3: the server's answer is not SGLang's"),
        ((200, [answered([], [])] * 2), RuntimeFault, "row 3: the server's answer is not SGLang's"),
        ((200, [{"text": "", "meta_info": {"finish_reason": None}}] * 2), RuntimeFault, "is not SGLang's"),
        ((200, [answered([-1.0], [5], "abort")] * 2), RuntimeFault, "row 3: the server ended the request: aborted"),
    ],
)
def test_what_is_no_answer_names_the_row(result: Answer, error: type[Exception], said: str) -> None:
    with fake_server(lambda path, body, number: result) as fake, pytest.raises(error, match=said):
        HttpSampler(fake.url, None, SAMPLING).sample("mine", [Asked([5], [1, 2], "row 3")])


def test_a_log_probability_that_is_no_number_is_refused() -> None:
    answers = [answered([None, -1.0], [5, 6])] * 2  # type: ignore[list-item]
    with fake_server(lambda path, body, number: (200, answers)) as fake, pytest.raises(NumericsError, match="row 3"):
        HttpSampler(fake.url, None, SAMPLING).sample("mine", [Asked([5], [1, 2], "row 3")])


def test_a_name_that_the_server_does_not_have_is_forgotten_already() -> None:
    with fake_server(lambda path, body, number: (404 if number == 1 else 500, {})) as fake:
        sampler = HttpSampler(fake.url, None, SAMPLING)
        sampler.forget("mine")
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            sampler.forget("mine")
    assert [path for path, _ in fake.requests] == ["/kt/adapters/mine"] * 2
