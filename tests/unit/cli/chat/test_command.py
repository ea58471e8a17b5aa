"""Faults while chatting, made by a server that fails on purpose; a real one is in tests/system."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from reference.server.fake_server import Answer, fake_server

from kt_runtime.cli.chat.conversation import Conversation
from kt_runtime.errors import KtError, RuntimeFault, ServerUnreachableError, UserError


def events(*pieces: str, finished: bool = True, extra: str = "") -> bytes:
    lines: list[dict[str, Any]]
    lines = [{"choices": [{"delta": {"content": piece}, "finish_reason": None}]} for piece in pieces]
    if finished:
        lines.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {json.dumps(line)}\n\n" for line in lines).encode() + extra.encode()


def ask(
    answer: Callable[[str, Any, int], Answer], *questions: str, **fields: Any
) -> tuple[Conversation, list[str], Any]:
    with fake_server(answer) as fake, httpx.Client(base_url=fake.url, trust_env=False) as http:
        conversation = Conversation(http, "base", 4096, **fields)
        return conversation, ["".join(conversation.ask(question)) for question in questions], fake


def test_history_system_prompt_and_adapter_are_sent() -> None:
    conversation, answers, fake = ask(
        lambda *_: (200, events("I am ", "Pebble.", extra="data: [DONE]\n\n")),
        *("Who?", "Who else?"),
        adapter="pebble",
        system="Be kind.",
        max_new_tokens=7,
    )
    assert answers == ["I am Pebble."] * 2
    body = fake.requests[1][1]
    assert (body["model"], body["max_tokens"]) == ("base:pebble", 7)
    assert [message["content"] for message in body["messages"]] == ["Be kind.", "Who?", "I am Pebble.", "Who else?"]
    assert len(conversation.turns) == 4


def test_a_limit_that_may_not_fit_is_left_to_the_context() -> None:
    _, _, fake = ask(lambda *_: (200, events("yes")), "b" * 4000, max_new_tokens=100)
    assert "max_tokens" not in fake.requests[0][1]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((400, {"error": {"message": "too\nlong"}}), UserError, "the server answers 400: too long"),
        ((400, {"object": "error", "message": "no such model"}), UserError, "the server answers 400: no such model"),
        ((500, b"Internal Server Error"), RuntimeFault, "the server answers 500: Internal Server Error"),
        ((200, b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'), RuntimeFault, "500: out of memory"),
        ((200, events("half", finished=False)), RuntimeFault, "the answer ended before its end"),
        ((200, b"data: {not JSON\n\n"), RuntimeFault, "not a stream of JSON events"),
        ((200, None), ServerUnreachableError, "the connection failed"),
    ],
)
def test_an_error_is_one_line_and_takes_the_question_back(answer: Answer, error: type[KtError], message: str) -> None:
    with fake_server(lambda *_: answer) as fake, httpx.Client(base_url=fake.url, trust_env=False) as http:
        conversation = Conversation(http, "base", 4096)
        with pytest.raises(error, match=message) as raised:
            list(conversation.ask("Who?"))
    assert "\n" not in str(raised.value)
    assert conversation.turns == []


def test_a_stopped_answer_stays_as_far_as_it_came() -> None:
    with (
        fake_server(lambda *_: (200, events("one ", "two ", "three"))) as fake,
        httpx.Client(base_url=fake.url, trust_env=False) as http,
    ):
        conversation = Conversation(http, "base", 4096)
        pieces = conversation.ask("Count!")
        assert [next(pieces), next(pieces)] == ["one ", "two "]
        pieces.close()
    assert conversation.turns == [{"role": "user", "content": "Count!"}, {"role": "assistant", "content": "one two "}]


def test_without_a_server_chat_says_how_to_get_one(run: Callable[..., Any]) -> None:
    ran = run("chat")
    assert ran.returncode == 1
    assert "kt-runtime serve" in ran.stderr and "Traceback" not in ran.stderr


def test_overrides_need_a_recipe(run: Callable[..., Any]) -> None:
    ran = run("chat", "top_p=0.5")
    assert ran.returncode == 2 and "--recipe" in ran.stderr
