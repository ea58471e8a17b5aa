"""The served base against Hugging Face in float32: greedy tokens and logprobs, cached or not, alone or batched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from reference.place import Place
from reference.server import greedy
from reference.server.greedy import Expected

NEW_TOKENS = 12
LOGPROB_TOLERANCE = 5e-5  # float32, sums in another order; 5.7e-6 was measured on a Zen 3
LENGTHS = (1, 2, 7, 33, 150, 400)  # in chunks of 64 tokens and pages of 8


@pytest.fixture(scope="module")
def expected(float32_server: Any) -> list[Expected]:
    """What Hugging Face says about prompts of several lengths; the last two share a prefix with another one."""
    model = greedy.load_hugging_face(float32_server.model_directory)
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 700, (length,), generator=g).tolist() for length in LENGTHS]
    prompts += [prompts[4][:100] + prompts[3], prompts[4] + prompts[2]]
    answers = [answer["output_ids"] for answer in generate(float32_server, prompts)]
    expected = [greedy.expected_of(model, *case) for case in zip(prompts, answers, strict=True)]
    assert [case.tokens for case in expected] == [p + a for p, a in zip(prompts, answers, strict=True)]
    return expected


def generate(served: Any, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
    return greedy.generate(served.api, prompts, NEW_TOKENS, **options)


Check = Callable[[dict[str, Any], Expected], float]


@pytest.fixture
def check(place: Place) -> Check:
    return lambda answer, expected: greedy.check(answer, expected, LOGPROB_TOLERANCE * place.float32_factor)


def flush_cache(served: Any) -> None:
    httpx.post(f"{served.api.url}/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()


def test_greedy_tokens_and_logprobs_equal_hugging_faces(
    float32_server: Any, expected: list[Expected], check: Check
) -> None:
    flush_cache(float32_server)
    answers = [generate(float32_server, [case.prompt], logprob_start_len=0)[0] for case in expected]
    largest = max(check(answer, case) for answer, case in zip(answers, expected, strict=True))
    print(f"{float32_server.preset}: largest difference of a logprob {largest:.1e}")


def test_a_batch_answers_as_each_prompt_does_alone(float32_server: Any, expected: list[Expected], check: Check) -> None:
    flush_cache(float32_server)
    for answer, case in zip(generate(float32_server, [case.prompt for case in expected]), expected, strict=True):
        check(answer, case)


def test_a_cached_prefix_answers_as_a_cold_one(float32_server: Any, expected: list[Expected], check: Check) -> None:
    flush_cache(float32_server)
    long, shares_100, continues = expected[4], expected[6], expected[7]
    assert generate(float32_server, [long.prompt])[0]["meta_info"]["cached_tokens"] == 0
    for case, at_least in ((shares_100, 96), (continues, 144), (long, 144)):
        answer = generate(float32_server, [case.prompt])[0]
        assert at_least <= answer["meta_info"]["cached_tokens"] < len(case.prompt)
        check(answer, case)


def test_a_batch_of_hits_and_misses_answers_as_each_does_cold(
    float32_server: Any, expected: list[Expected], check: Check
) -> None:
    flush_cache(float32_server)
    generate(float32_server, [expected[4].prompt])
    answers = generate(float32_server, [case.prompt for case in expected])
    assert [answer["meta_info"]["cached_tokens"] > 0 for answer in answers].count(True) >= 3
    for answer, case in zip(answers, expected, strict=True):
        check(answer, case)
