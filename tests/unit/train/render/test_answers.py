"""Finding answers in rendered text: where they begin and end when templates drop, open and rewrite think blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from reference.chat_templates import assistant, user

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.render.answers import HISTORY, OPENED, AnswerFinder, closing_of

Messages = Sequence[dict[str, Any]]


def plain(messages: Messages, add_generation_prompt: bool) -> str:
    return "".join(f"[{m['role'][0]}]{m['content']}." for m in messages) + "[a]" * add_generation_prompt


def forgetful(messages: Messages, add_generation_prompt: bool) -> str:
    """Keeps the think block of the last message only, as Qwen3 does."""
    visible = [{**m, "content": m["content"].rpartition("</think>")[2]} for m in messages[:-1]]
    return plain([*visible, *messages[-1:]], add_generation_prompt)


def opening(messages: Messages, add_generation_prompt: bool) -> str:
    """Begins every answer with a think block that no rendering of answers holds, as DeepSeek-R1 does."""
    visible = [{**m, "content": m["content"].rpartition("</think>")[2]} for m in messages]
    return plain(visible, add_generation_prompt) + "<think>\n" * add_generation_prompt


def found(render: Any, messages: Messages, *, last_only: bool = False) -> tuple[list[str], list[str]]:
    notes: dict[str, None] = {}
    finder = AnswerFinder(render, closing_of(render), lambda note: notes.setdefault(note))
    text, spans = finder.conversation(messages, "d:1", last_only=last_only)
    return [text[start:end] for start, end in spans], list(notes)


def test_the_closing_is_what_follows_every_answer() -> None:
    assert closing_of(plain) == closing_of(forgetful) == "."
    assert closing_of(lambda messages, prompt: messages[-1]["content"]) == ""


def test_answers_are_found_where_their_prompts_end() -> None:
    turns = (user("q"), assistant("[a]"), assistant("r"), user("[a]r."), assistant("r"))
    assert found(plain, turns) == (["[a].", "r.", "r."], [])
    assert found(plain, turns, last_only=True) == (["r."], [])


def test_an_earlier_answer_is_found_without_its_think_block() -> None:
    turns = (user("q"), assistant("<think>\nx</think><t"), user("q"), assistant("<think>\ny</think>z"))
    assert found(forgetful, turns) == (["<t.", "<think>\ny</think>z."], [HISTORY])


def test_an_answer_continues_a_prompt_that_opens_its_think_block() -> None:
    turns = (user("q"), assistant("<b>"), user("q"), assistant("<think>\ny\n</think>\n\nz"))
    assert found(opening, turns) == (["<b>.", "y\n</think>\n\nz."], [HISTORY])
    assert found(opening, (user("q"), assistant("y</think>z"))) == (["y</think>z."], [])
    assert found(opening, turns[:2]) == (["\n</think>\n\n<b>."], [OPENED.format(tag="<think>")])


def test_an_answer_that_is_rewritten_is_refused() -> None:
    def shouting(messages: Messages, add_generation_prompt: bool) -> str:
        rewritten = [*messages[:-1], {**messages[-1], "content": "!"}] if not add_generation_prompt else messages
        return plain(rewritten, add_generation_prompt)

    with pytest.raises(InvalidValueError, match=r"d:1: .* turn 2 differently"):
        found(shouting, (user("q"), assistant("r"), user("q"), assistant("r")))
