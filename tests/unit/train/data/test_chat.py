"""Sharegpt and OpenAI rows: roles and their order, tools, and preference pairs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError

OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}


def turns(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"from": role, "value": text} for role, text in pairs]


def messages(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in pairs]


CALL = {"name": "add", "arguments": {"a": 1}}
CALLED = [{"type": "function", "function": CALL}]


def test_sharegpt_turns_become_messages(datasets: Any) -> None:
    row = {
        "conversations": turns(
            ("human", "2 + 1?"), ("function_call", json.dumps(CALL)), ("observation", "3"), ("gpt", "It is 3.")
        ),
        "system": "Count.",
        "tools": json.dumps([{"name": "add"}]),
    }
    columns = {"messages": "conversations", "system": "system", "tools": "tools"}
    (made,) = datasets.read_rows([row], formatting="sharegpt", columns=columns)
    assert list(made.messages) == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "2 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": CALLED},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    assert made.tools == ({"type": "function", "function": {"name": "add"}},)


def test_a_thought_before_a_call_stays(datasets: Any) -> None:
    row = {"conversations": turns(("human", "q"), ("function_call", f"<think>hm</think>\n{json.dumps([CALL, CALL])}"))}
    (made,) = datasets.read_rows([row], formatting="sharegpt")
    assert made.messages[-1] == {"role": "assistant", "content": "<think>hm</think>", "tool_calls": CALLED * 2}


def test_tags_name_the_roles(datasets: Any) -> None:
    row = {"messages": messages(("system", "s"), ("user", "q"), ("assistant", "a"))}
    entry = {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": OPENAI_TAGS}
    (made,) = datasets.read_rows([row], **entry)
    assert list(made.messages) == row["messages"]


def test_openai_rows_keep_calls_ids_and_parallel_tool_turns(datasets: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {
        "messages": [
            *messages(("user", "q")),
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
            {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "c2"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    (made,) = datasets.read_rows([row], formatting="openai")
    assert list(made.messages) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{**CALLED[0], "id": "c1"}] * 2},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "4", "tool_call_id": "c2"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
    ]
    assert made.tools == tuple(row["tools"]), "and no system message is made up"


@pytest.mark.parametrize("formatting", ["sharegpt", "openai"])
def test_preference_pairs_answer_the_last_question(datasets: Any, formatting: str) -> None:
    make, column, user, gpt = (
        (turns, "conversations", "human", "gpt")
        if formatting == "sharegpt"
        else (messages, "messages", "user", "assistant")
    )
    (chosen,), (rejected,) = make((gpt, "good")), make((gpt, "bad"))
    row = {column: make((user, "q"), (gpt, "a"), (user, "r")), "chosen": chosen, "rejected": rejected}
    (made,) = datasets.read_rows([row], {"stage": "dpo"}, formatting=formatting, ranking=True)
    assert list(made.messages) == messages(("user", "q"), ("assistant", "a"), ("user", "r"))
    assert (made.chosen, made.rejected) == tuple(messages(("assistant", "good"), ("assistant", "bad")))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (turns(("human", "q"), ("robot", "a")), "wrong role 'robot'; roles are function_call, gpt, human, observation"),
        (turns(("gpt", "a"), ("human", "q")), "wrong order of roles: 'gpt' comes first"),
        (turns(("human", "q"), ("human", "q"), ("gpt", "a")), "wrong order of roles: 'human' follows 'human'"),
        (turns(("human", "q"), ("gpt", "a"), ("human", "q")), "wrong number of turns: the last is 'human'"),
        (turns(("human", "q"), ("system", "s"), ("gpt", "a")), "wrong role 'system'"),
        (turns(("human", "q"), ("gpt", " ")), "its answer is empty"),
        (turns(("human", "q"), ("gpt", ""), ("human", "r"), ("gpt", "a")), "one of its answers is empty"),
        ([], "it has no turns"),
    ],
)
def test_a_row_with_wrong_turns_is_left_out_and_named(datasets: Any, bad: Any, reason: str) -> None:
    good = {"conversations": turns(("human", "q"), ("gpt", "a"))}
    made = datasets.read_rows([good, {"conversations": bad}, good], formatting="sharegpt")
    assert [row.where.rsplit(":", 1)[1] for row in made] == ["1", "3"]
    path = datasets.directory / "d.jsonl"
    assert datasets.said[0].startswith(f"dataset d: {path}:2: left out: {reason}")
    assert datasets.said[1:] == ["dataset d: 1 of 3 rows left out"]


def test_only_the_last_answer_counts_with_mask_history(datasets: Any) -> None:
    row = {"conversations": turns(("human", "q"), ("gpt", ""), ("human", "r"), ("gpt", "a"))}
    assert len(datasets.read_rows([row], {"mask_history": True}, formatting="sharegpt")) == 1


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": 5}, r"d.jsonl:1: conversations: 5: must be a list of turns"),
        ({"conversation": []}, r"d.jsonl:1: no column 'conversations'; did you mean 'conversation'"),
        ({"conversations": ["q"]}, r"d.jsonl:1: conversations: turn 1: 'q': must be a mapping"),
        ({"conversations": messages(("user", "q"))}, r"turn 1: from: None: must name the turn's role"),
        ({"conversations": turns(("human", 7), ("gpt", "a"))}, r"turn 1: value: 7: must be text"),
        ({"conversations": turns(("human", "q"), ("function_call", "add"))}, r"turn 2: function_call: not valid JSON"),
        ({"conversations": turns(("human", "q"), ("function_call", "5"))}, r"turn 2: function_call: 5: must be a call"),
        (
            {"conversations": turns(("human", [{"type": "image_url"}]), ("gpt", "a"))},
            "turn 1: value: .*only parts of type text",
        ),
    ],
)
def test_wrong_types_are_errors_with_line_turn_and_value(datasets: Any, row: Any, expected: str) -> None:
    with pytest.raises(InvalidValueError, match=expected):
        datasets.read_rows([row], formatting="sharegpt")


def test_openais_weight_of_an_answer_is_kept_and_checked(datasets: Any) -> None:
    talk = messages(("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", "b"))
    talk[1]["weight"], talk[3]["weight"] = 0, None
    (made,) = datasets.read_rows([{"messages": talk}], formatting="openai")
    assert [message.get("weight") for message in made.messages] == [None, 0, None, None]
    talk[3]["weight"] = 0.5
    with pytest.raises(InvalidValueError, match=r"turn 4: weight: 0\.5: must be 0, not learnt from, or 1"):
        datasets.read_rows([{"messages": talk}], formatting="openai")
    sharegpt = turns(("human", "q"), ("gpt", "a"))
    sharegpt[1]["weight"] = 0.5
    (made,) = datasets.read_rows([{"conversations": sharegpt}], formatting="sharegpt")
    assert "weight" not in made.messages[1]
