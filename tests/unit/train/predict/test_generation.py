"""Faults between here and the server, made by a server that fails on purpose."""

from __future__ import annotations

import _thread
import threading
import time
from typing import Any

import pytest
from reference.server.fake_server import Answer, fake_server

from kt_runtime.errors import InvalidValueError, RuntimeFault, ServerUnreachableError
from kt_runtime.train.predict.generation import Generator, Prompt

PROMPTS = [Prompt([1, 2, index], 8, f"data.jsonl:{index + 1}") for index in range(12)]
AT_ONCE = 4
ABORTED = {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "gone"}}}


def answer_to(body: Any) -> Answer:
    return 200, {"text": f"answer {body['input_ids'][-1]}", "meta_info": {"finish_reason": {"type": "stop"}}}


def generator(url: str, **fields: Any) -> Generator:
    return Generator(url, None, fields.pop("adapter", None), {"temperature": 0}, AT_ONCE, (0.01, 0.02), **fields)


def collect(asked: Generator, prompts: list[Prompt] = PROMPTS) -> dict[int, str]:
    answers: dict[int, str] = {}
    asked.answer(prompts, answers.__setitem__)
    return answers


def test_every_prompt_is_answered_once_and_few_at_a_time() -> None:
    def answer(path: str, body: Any, _: int) -> Answer:
        time.sleep(0.02)
        return answer_to(body)

    with fake_server(answer) as fake:
        answers = collect(generator(fake.url, adapter="pebble"))
    assert answers == {index: f"answer {index}" for index in range(12)}
    assert len(fake.requests) == 12
    assert 1 < fake.most_at_once <= AT_ONCE
    assert {path for path, _ in fake.requests} == {"/generate"}
    assert min((body for _, body in fake.requests), key=lambda body: body["input_ids"]) == {
        "input_ids": [1, 2, 0],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8},
        "lora_path": "pebble",
    }


@pytest.mark.parametrize("failure", [(503, {"error": "busy"}), (502, b"bad gateway"), (200, None)])
def test_a_passing_failure_is_tried_again(failure: Answer) -> None:
    seen: set[int] = set()

    def answer(_: str, body: Any, number: int) -> Answer:
        index = body["input_ids"][-1]
        is_first = index not in seen
        seen.add(index)
        return failure if is_first else answer_to(body)

    with fake_server(answer) as fake:
        assert len(collect(generator(fake.url))) == 12
        assert len(fake.requests) == 24


def test_a_server_that_stays_away_ends_the_run_with_its_place_and_reason() -> None:
    with (
        fake_server(lambda *_: (503, {})) as fake,
        pytest.raises(ServerUnreachableError, match=r"data.jsonl:\d+: http://.* in 3 tries: HTTP 503"),
    ):
        collect(generator(fake.url))
    with pytest.raises(ServerUnreachableError, match="ConnectError"):
        collect(generator("http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((400, {"error": {"message": "the prompt is bad"}}), InvalidValueError, "HTTP 400: the prompt is bad"),
        ((500, b"Internal Server Error"), RuntimeFault, "HTTP 500: Internal Server Error"),
        ((200, b"<html>"), RuntimeFault, "not SGLang's: <html>"),
        (
            (200, {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "gone"}}}),
            RuntimeFault,
            "gone",
        ),
    ],
)
def test_another_failure_ends_the_run_at_once(answer: Answer, error: type[Exception], message: str) -> None:
    with (
        fake_server(lambda _, body, number: answer if number == 6 else answer_to(body)) as fake,
        pytest.raises(error, match=message) as raised,
    ):
        collect(generator(fake.url))
    assert "data.jsonl:" in str(raised.value)
    assert len(fake.requests) <= 6 + AT_ONCE


def test_answers_that_came_before_a_failure_are_handed_over() -> None:
    answers: dict[int, str] = {}
    with (
        fake_server(lambda _, body, number: (400, {}) if body["input_ids"][-1] == 8 else answer_to(body)) as fake,
        pytest.raises(InvalidValueError),
    ):
        generator(fake.url).answer(PROMPTS, answers.__setitem__)
    assert len(answers) >= 8 - (AT_ONCE - 1)  # others may have been in progress


def test_ctrl_c_ends_the_run_and_closes_the_connections() -> None:
    closed = threading.Event()
    waited: list[bool] = []

    def answer(_: str, body: Any, number: int) -> Answer:
        if number == 1:
            return answer_to(body)
        _thread.interrupt_main() if number == 2 else None
        waited.append(closed.wait(60))
        return answer_to(body)

    answers: dict[int, str] = {}
    with fake_server(answer) as fake:
        with pytest.raises(KeyboardInterrupt):
            generator(fake.url).answer(PROMPTS, answers.__setitem__)
        assert not waited  # no answer but the first had been given
        closed.set()
    assert len(answers) <= 1  # that of the first request to arrive


def test_what_came_from_the_prefix_cache_is_counted() -> None:
    def answer(_: str, body: Any, number: int) -> Answer:
        status, value = answer_to(body)
        return status, {**value, "meta_info": {**value["meta_info"], "prompt_tokens": 1000, "cached_tokens": 750}}

    with fake_server(answer) as fake:
        use = generator(fake.url).answer(PROMPTS, lambda index, text: None)
    assert str(use) == "12,000 prompt tokens sent, 9,000 of them from the server's prefix cache"
