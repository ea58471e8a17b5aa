"""What is asked of the serving path, in which order, and what is made of the answers; the server only counts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, cast

import numpy as np
import pytest
from reference.server.fake_server import Answer, fake_server

from kt_runtime.errors import InvalidValueError, NumericsError, RuntimeFault
from kt_runtime.train.examples import Example, Pair
from kt_runtime.train.serving_path import Ask, ServingPath
from kt_runtime.train.stages.reference_logprobs import Counters, ask_reference

AT_ONCE = 4
PROMPT_TOKENS = 20


def example(prompt: int, answer: list[int]) -> Example:
    ids = [1, *[prompt] * (PROMPT_TOKENS - 1), *answer]
    return Example.of(ids, [False] * PROMPT_TOKENS + [True] * len(answer), f"d.json:{prompt}")


def pairs(num_pairs: int, num_prompts: int) -> list[Pair]:
    """Each pair's chosen answer is its own; the rejected one is the same for all pairs of a prompt."""
    prompts = [100 + index % num_prompts for index in range(num_pairs)]
    return [Pair(example(prompt, [300 + index, 7]), example(prompt, [8])) for index, prompt in enumerate(prompts)]


class Cache:
    """Answers as SGLang does with pages of one token: a prefix is cached once a request with it has been answered."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds, self._lock = seconds, threading.Lock()
        self._known: set[tuple[int, ...]] = set()
        self.open: list[int] = []
        self.most_open = 0

    def __call__(self, path: str, body: Any, number: int) -> Answer:
        ids, start = body["input_ids"], body["logprob_start_len"]
        with self._lock:
            self.open.append(ids[1])
            self.most_open = max(self.most_open, len(set(self.open)))
            cached = max(n for n in range(start + 1) if n == 0 or tuple(ids[:n]) in self._known)
        time.sleep(self._seconds)
        with self._lock:
            self._known |= {tuple(ids[:n]) for n in range(1, len(ids) + 1)}
            self.open.remove(ids[1])
        return 200, answer(ids, start, cached)


def answer(ids: list[int], start: int, cached: int = 0) -> dict[str, Any]:
    logprobs = [[None, ids[start], None], *([-token / 1000, token, None] for token in ids[start + 1 :])]
    meta = {"finish_reason": {"type": "length"}, "prompt_tokens": len(ids), "cached_tokens": cached}
    return {"text": "", "meta_info": {**meta, "input_token_logprobs": logprobs}}


def ask(url: str, asked: list[Pair], counters: Counters | None = None, stop: Any = lambda: False) -> dict[int, Any]:
    found: dict[int, Any] = {}

    def scored(each: Example, logprobs: Any) -> None:
        assert id(each) not in found
        found[id(each)] = logprobs.tolist()

    path = ServingPath(url, None, "elder", AT_ONCE, (0.01,))
    finished = ask_reference(path, asked, counters or Counters(), scored, stop)
    assert finished != stop()
    return found


class OrderOfRequests:
    """A ServingPath that answers in this process: a server may see requests sent at once in any order."""

    num_at_once = AT_ONCE

    def __init__(self) -> None:
        self.prompts: list[int] = []

    def run(self, work: Callable[[Ask], Coroutine[Any, Any, None]]) -> None:
        asyncio.run(work(self._ask))

    async def _ask(self, body: dict[str, Any], where: str) -> dict[str, Any]:
        self.prompts.append(body["input_ids"][1])
        await asyncio.sleep(0)
        return answer(body["input_ids"], body["logprob_start_len"])


def test_each_prefix_is_computed_once_and_each_example_has_its_answers_log_probabilities() -> None:
    asked, counters = pairs(60, 6), Counters()
    with fake_server(Cache(0.003)) as fake:
        found = ask(fake.url, asked, counters)
    assert len(found) == 120
    for pair in asked:
        for each in pair.examples:
            expected = (-each.targets[each.trained] / 1000).astype(np.float32)
            assert found[id(each)] == expected.tolist()
    assert fake.requests[0][1] == {
        "input_ids": asked[0].chosen.ids.tolist(),
        "return_logprob": True,
        "logprob_start_len": PROMPT_TOKENS - 1,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
        "lora_path": "elder",
    }
    prefix = PROMPT_TOKENS - 1  # of which the prompts share their first token, which the very first request brings
    assert len(fake.requests) == counters.num_answers == 66
    assert (counters.num_pairs, len(counters.prompts), counters.prefix_tokens) == (60, 6, 6 * prefix)
    assert counters.prefix_tokens_computed == 6 * prefix - 5
    assert counters.tokens_computed == 6 * prefix - 5 + 60 * 3 + 6 * 2
    assert 1 < fake.most_at_once <= AT_ONCE
    assert "60 pairs over 6 prompts" in str(counters) and "109 were computed" in str(counters)


def test_few_prompts_are_open_at_a_time_and_the_longest_comes_first() -> None:
    asked = pairs(60, 20)
    long = Pair(example(99, [5] * 30), example(99, [6]))
    cache = Cache(0.002)
    with fake_server(cache) as fake:
        ask(fake.url, [*asked, long])
    assert len(fake.requests[0][1]["input_ids"]) == PROMPT_TOKENS + 30
    assert cache.most_open <= AT_ONCE + 1


def test_prompts_of_an_earlier_call_come_before_others_that_may_push_them_out_of_the_cache() -> None:
    asked, counters, order = pairs(60, 20), Counters(), OrderOfRequests()
    path = cast(ServingPath, order)
    ask_reference(path, asked[:3], counters, lambda *_: None, lambda: False)
    order.prompts.clear()
    ask_reference(path, asked[3:], counters, lambda *_: None, lambda: False)
    assert set(list(dict.fromkeys(order.prompts))[1:4]) == {100, 101, 102}  # after the longest
    assert (counters.num_pairs, len(counters.prompts)) == (60, 20)


def test_one_prompt_is_no_bottleneck() -> None:
    with fake_server(Cache(0.01)) as fake:
        ask(fake.url, pairs(40, 1))
    assert fake.most_at_once == AT_ONCE


def test_stop_ends_it_without_waiting_for_the_server() -> None:
    release, asked = threading.Event(), pairs(40, 4)
    waited: list[bool] = []

    def hang(path: str, body: Any, number: int) -> Answer:
        if number > 5:
            waited.append(release.wait(60))
        return 200, answer(body["input_ids"], body["logprob_start_len"])

    with fake_server(hang) as fake:
        found = ask(fake.url, asked, stop=lambda: len(fake.requests) > 6)
        assert not waited  # all still hang
        release.set()
    assert 1 <= len(found) < 40


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda logprobs: logprobs[:-1], RuntimeFault, "d.json:100: .* 1 log-probabilities of 2"),
        (lambda logprobs: [*logprobs[:-1], [float("nan"), 7, None]], NumericsError, "d.json:100: .* not all numbers"),
        (lambda logprobs: [*logprobs[:-1], [None, 7, None]], NumericsError, "d.json:100: .* not all numbers"),
        (lambda logprobs: 3, RuntimeFault, "d.json:100: the server's answer is not SGLang's"),
    ],
)
def test_an_answer_that_is_none_ends_it_with_the_row(change: Any, error: type[Exception], message: str) -> None:
    def wrong(path: str, body: Any, number: int) -> Answer:
        value = answer(body["input_ids"], body["logprob_start_len"])
        value["meta_info"]["input_token_logprobs"] = change(value["meta_info"]["input_token_logprobs"])
        return 200, value

    with fake_server(wrong) as fake, pytest.raises(error, match=message):
        ask(fake.url, pairs(3, 1))


def test_a_row_that_the_server_refuses_is_named_with_the_way_out() -> None:
    refusal = {"error": {"message": "Input length (23 tokens) exceeds the maximum"}}
    with fake_server(lambda *_: (400, refusal)) as fake, pytest.raises(InvalidValueError) as raised:
        ask(fake.url, pairs(3, 1))
    for text in ("d.json:100: ", "Input length (23 tokens)", "with twin the server is not asked"):
        assert text in str(raised.value)
    assert len(fake.requests) == 1
