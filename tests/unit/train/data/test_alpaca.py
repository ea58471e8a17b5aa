"""Alpaca rows: how columns become turns, and what of a row is an error."""

from __future__ import annotations

from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.data import Conversation, Preference


def texts(row: Conversation | Preference) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row.messages]


def test_question_input_history_and_system_become_turns(datasets: Any) -> None:
    row = {"instruction": "Say", "input": "hi", "output": "hi", "system": "Be brief.", "history": [["a", "b"]]}
    (made,) = datasets.read_rows([row])
    assert texts(made) == [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "Say\nhi"),
        ("assistant", "hi"),
    ]
    assert made.where == f"{datasets.directory / 'd.jsonl'}:1"
    assert datasets.said == [
        f"dataset d: {made.where}: column system, history is read, though dataset_info.json does not name it"
    ]


@pytest.mark.parametrize("empty", ["", None])
def test_an_empty_input_adds_no_line(datasets: Any, empty: str | None) -> None:
    (made,) = datasets.read_rows([{"instruction": "q", "input": empty, "output": "a", "note": 7}])
    assert texts(made) == [("user", "q"), ("assistant", "a")]


def test_columns_not_named_are_not_read_and_that_is_said(datasets: Any) -> None:
    row = {"q": "Say", "input": "not read", "a": "hi", "system": "not read"}
    (made,) = datasets.read_rows([row], columns={"prompt": "q", "response": "a"})
    assert texts(made) == [("user", "Say"), ("assistant", "hi")]
    assert "column system is not read" in datasets.said[0]


def test_default_system_stands_where_a_row_has_none(datasets: Any) -> None:
    rows = [{"instruction": "q", "output": "a", "system": system} for system in ("own", "", None)]
    made = datasets.read_rows(rows, {"default_system": "theirs"})
    assert [row.messages[0]["content"] for row in made] == ["own", "theirs", "theirs"]


def test_tools_are_read_as_json_text(datasets: Any) -> None:
    (made,) = datasets.read_rows([{"instruction": "q", "output": "a", "tools": '[{"name": "add", "parameters": {}}]'}])
    assert made.tools == ({"type": "function", "function": {"name": "add", "parameters": {}}},)


def test_preference_rows_have_two_answers(datasets: Any) -> None:
    row = {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"}
    columns = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    (made,) = datasets.read_rows([row], {"stage": "dpo"}, ranking=True, columns=columns)
    assert texts(made) == [("user", "q")]
    assert made.chosen == {"role": "assistant", "content": "good"}
    assert made.rejected == {"role": "assistant", "content": "bad"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": 5, "output": "a"}, "d.jsonl:2: instruction: 5: must be text"),
        ({"instruction": "q", "output": ["a"]}, r"d.jsonl:2: output: \['a'\]: must be text"),
        ({"instruction": "q", "ouput": "a"}, "d.jsonl:2: no column 'output'; did you mean 'ouput'"),
        (
            {"prompt": "q", "output": "a"},
            "d.jsonl:2: no column 'instruction' or 'input'; the row has 'prompt', 'output'",
        ),
        ({"instruction": "", "output": "a"}, "d.jsonl:2: instruction: '': the question must not be empty"),
        ({"instruction": "q", "output": "a", "history": [["x"]]}, "d.jsonl:2: history: .* pairs"),
        ({"instruction": "q", "output": "a", "history": "[["}, "d.jsonl:2: history: not valid JSON"),
        ({"instruction": "q", "output": "a", "tools": "[5]"}, "d.jsonl:2: tools: .*every function"),
        ({"instruction": "q", "output": "a", "images": ["x.png"]}, "d.jsonl:2: images: .*pictures are not learnt"),
        ({"instruction": "q", "output": "a", "kto_tag": False}, "d.jsonl:2: kto_tag: False: kto is not a stage"),
        ("text", "d.jsonl:2: a row must be a mapping of columns, this is str: 'text'"),
    ],
)
def test_what_is_wrong_names_line_column_and_value(datasets: Any, row: Any, expected: str) -> None:
    with pytest.raises(InvalidValueError, match=expected):
        datasets.read_rows([{"instruction": "q", "output": "a"}, row])
