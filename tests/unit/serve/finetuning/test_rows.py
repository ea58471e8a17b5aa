"""Rows of training files: what each method takes, and what is wrong with a line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.finetuning.protocol.graders import read_grader
from kt_runtime.serve.finetuning.protocol.rows import check_file, translate

ASK, TELL = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "1"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TALK: dict[str, Any] = {"messages": [ASK, TELL]}
PAIR = {
    "input": {"messages": [ASK]},
    "preferred_output": [TELL],
    "non_preferred_output": [{"role": "assistant", "content": "b"}],
}
GRADER = {"type": "string_check", "input": "{{sample.output_text}}", "reference": "{{item.x}}", "operation": "eq"}


def file_of(place: Path, *rows: Any) -> Path:
    path = place / "rows.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize(
    ("method", "row"),
    [
        ("supervised", TALK),
        ("supervised", {"messages": [{"role": "system", "content": "s"}, ASK, TELL, ASK, {**TELL, "weight": 1}]}),
        ("supervised", {"messages": [{"role": "developer", "content": "s"}, ASK, {**TELL, "weight": 0}, ASK, TELL]}),
        ("supervised", {"messages": [ASK, CALLS, RESULT, RESULT, TELL], "tools": TOOLS, "parallel_tool_calls": False}),
        ("supervised", {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, TELL]}),
        ("dpo", PAIR),
        ("dpo", {**PAIR, "input": {"messages": [ASK, CALLS, RESULT], "tools": TOOLS}}),
        ("reinforcement", {"messages": [ASK], "x": {"deep": [1]}}),
        ("reinforcement", {"messages": [ASK, TELL, ASK], "tools": TOOLS, "x": "y"}),
    ],
)
def test_a_file_is_for_the_method_whose_rows_it_has(tmp_path: Path, method: str, row: Any) -> None:
    assert check_file(file_of(tmp_path, b"", row, b"  ", row)) == (method, 2)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (b"{nonsense", "not valid JSON"),
        (b'{"messages": NaN}', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"messages": [], "messages": []}', "twice"),
        (b"\xff{}", "not valid UTF-8"),
        ({}, "messages is missing"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "completion": "b"}, "older models"),
        ({**TALK, "functions": [{}]}, "write tools"),
        ({**TALK, "temperature": 1}, "unknown field"),
        ({"messages": [{"role": "usr", "content": "q"}, TELL]}, "messages[0].role"),
        ({"messages": [ASK]}, "the last is of role 'user'"),
        ({"messages": [ASK, ASK, TELL]}, "messages[1]: 'user' follows 'user'"),
        ({"messages": [TELL]}, "messages[0]: 'assistant' comes first"),
        ({"messages": [ASK, TELL, {"role": "system", "content": "s"}, TELL]}, "it must be the first"),
        ({"messages": [ASK, RESULT, TELL]}, "'tool' follows 'user'"),
        ({"messages": [ASK, {**TELL, "weight": 0}]}, "there is nothing to learn"),
        ({"messages": [ASK, {**TELL, "weight": 2}]}, "weight"),
        ({"messages": [{**ASK, "weight": 1}, TELL]}, "only an assistant's message has it"),
        ({"messages": [ASK, {"role": "assistant", "content": " "}]}, "neither content nor tool_calls"),
        ({"messages": [{"role": "user", "content": " "}, TELL]}, "needs content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, TELL]}, "messages[0].content"),
        ({"messages": [ASK, CALLS, {"role": "tool", "content": "1"}, TELL]}, "needs tool_call_id"),
        ({"messages": [ASK, {**CALLS, "tool_calls": [{**CALL, "id": 3}]}]}, "tool_calls[0].id"),
        (
            {"messages": [ASK, {**CALLS, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]}]},
            "must be a JSON object as text",
        ),
        ({**PAIR, "preferred_output": []}, "preferred_output"),
        ({**PAIR, "preferred_output": [ASK]}, "preferred_output[0].role is 'user'"),
        ({**PAIR, "non_preferred_output": [TELL]}, "the same answer"),
        ({**PAIR, "input": {"messages": [ASK, TELL]}}, "it must be the question"),
        ({"messages": [ASK], "x": 1, "response_format": {"type": "json_object"}}, "without a grammar"),
    ],
)
def test_a_wrong_row_is_named_by_its_line(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"^line 2: .*{re.escape(said)}"):
        check_file(file_of(tmp_path, b"", row))


def test_every_wrong_line_is_listed_and_many_are_counted(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError) as failed:
        check_file(file_of(tmp_path, TALK, *[{"messages": [ASK]}] * 13, PAIR))
    lines = str(failed.value).splitlines()
    assert [line.split(":")[0] for line in lines[:10]] == [f"line {number}" for number in range(2, 12)]
    assert lines[10:] == ["and 4 more"]


def test_rows_of_two_methods_and_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="line 2: a row for method dpo; the rows before are for supervised"):
        check_file(file_of(tmp_path, TALK, PAIR))
    with pytest.raises(InvalidValueError, match="the file is empty"):
        check_file(file_of(tmp_path, b""))


def test_the_translation_keeps_lines_and_is_what_the_trainer_reads(tmp_path: Path) -> None:
    from kt_runtime.train.data import read_named
    from kt_runtime.train.recipe import Recipe

    rows: dict[str, list[Any]] = {
        "supervised": [{"messages": [{"role": "developer", "content": "s"}, ASK, CALLS, RESULT, TELL], "tools": TOOLS}],
        "dpo": [PAIR],
        "reinforcement": [{"messages": [ASK], "x": 5}],
    }
    for method, stage in (("supervised", "sft"), ("dpo", "dpo"), ("reinforcement", "grpo")):
        source = file_of(tmp_path, b"", *rows[method])
        grader = read_grader(GRADER) if method == "reinforcement" else None
        assert translate(source, tmp_path / "train.jsonl", method, grader) == 1  # type: ignore[arg-type]
        columns = {name: name for name in ("messages", "tools", *(("chosen", "rejected") if stage == "dpo" else ()))}
        info = {"file_name": "train.jsonl", "formatting": "openai", "ranking": stage == "dpo", "columns": columns}
        (tmp_path / "dataset_info.json").write_text(json.dumps({"train": info}))
        notes: list[str] = []
        recipe = Recipe(stage=stage, dataset_dir=tmp_path)
        ((_, read),) = read_named(recipe, ("train",), notes.append)
        assert notes == [] and read.where == f"{tmp_path / 'train.jsonl'}:2"
        if method == "supervised":
            assert [message["role"] for message in read.messages] == [
                "system",
                "user",
                "assistant",
                "tool",
                "assistant",
            ]
            assert read.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
            assert read.tools is not None and read.tools[0]["function"]["name"] == "add"
        elif method == "dpo":
            assert (read.chosen["content"], read.rejected["content"]) == ("a", "b")  # type: ignore[union-attr]
        else:
            assert read.answer == "5"  # type: ignore[union-attr]
