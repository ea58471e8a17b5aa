"""Datasets: formats are understood exactly, and every error names file and line or row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError, NotFoundError, UnknownNameError
from kt_runtime.train.data import read_datasets


def write(tmp_path: Path, rows: list[Any] | bytes, name: str = "d.json", **description: Any) -> Path:
    info = {"d": {"file_name": name, **description}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    if isinstance(rows, bytes):
        data = rows
    elif name.endswith("l"):
        data = "\n".join(json.dumps(row) for row in rows).encode()
    else:
        data = json.dumps(rows).encode()
    (tmp_path / name).write_bytes(data)
    return tmp_path


def test_alpaca_rows_become_conversations(tmp_path: Path) -> None:
    row = {"instruction": "Say", "input": "hi", "output": "hi", "system": "Be brief.", "history": [["a", "b"]]}
    (conversation,) = read_datasets(write(tmp_path, [row]), ("d",))
    assert [(m["role"], m["content"]) for m in conversation.messages] == [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "Say\nhi"),
        ("assistant", "hi"),
    ]


def test_openai_rows_are_read_from_lines(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "x"}]} for i in range(3)
    ]
    conversations = read_datasets(write(tmp_path, rows, "d.jsonl", formatting="openai"), ("d",))
    assert [c.messages[0]["content"] for c in conversations] == ["0", "1", "2"]
    assert conversations[2].where == f"{tmp_path / 'd.jsonl'}:3"


def test_max_samples_holds_for_each_dataset(tmp_path: Path) -> None:
    rows = [{"instruction": "q", "output": "a"}] * 5
    assert len(read_datasets(write(tmp_path, rows), ("d", "d"), max_samples=2)) == 4


@pytest.mark.parametrize(
    ("rows", "description", "expected"),
    [
        ([{"instruction": "q", "output": ""}], {}, "row 1: output: '': must be non-empty text"),
        ([{"instruction": "q", "output": 5}], {}, "row 1: output: 5"),
        ([{"instruction": "q", "ouput": "a"}], {}, "unknown column 'ouput'"),
        ([{"instruction": "q", "output": "a", "history": [["x"]]}], {}, "history"),
        (["text"], {}, "row 1: a row must be a mapping"),
        ([], {}, "holds no rows"),
        ([{"messages": []}], {"formatting": "openai"}, "non-empty list"),
        ([{"messages": [{"role": "robot", "content": "x"}]}], {"formatting": "openai"}, "needs a role"),
        ([{"messages": [{"role": "user", "content": "x"}]}], {"formatting": "openai"}, "the last one must be"),
        (b'[\n{"instruction": "q"\n', {}, r"d.json:3: not valid JSON"),
        (b'[{"instruction": "caf\xe9"}]', {}, "byte 0xe9 is not UTF-8"),
        ([{}], {"columns": {"prompt": "x"}}, "columns is not honoured"),
    ],
)
def test_errors_name_the_place(tmp_path: Path, rows: Any, description: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidValueError, match=expected):
        read_datasets(write(tmp_path, rows, **description), ("d",))


def test_a_bad_line_of_jsonl_is_named(tmp_path: Path) -> None:
    good = json.dumps({"instruction": "q", "output": "a"})
    with pytest.raises(InvalidValueError, match=r"d.jsonl:2: not valid JSON"):
        read_datasets(write(tmp_path, f"{good}\n{{broken\n".encode(), "d.jsonl"), ("d",))


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    write(tmp_path, [{"instruction": "q", "output": "a"}])
    with pytest.raises(UnknownNameError, match=r"unknown dataset 'e'.* known: d"):
        read_datasets(tmp_path, ("e",))
    write(tmp_path, [{}], formatting="alpacca")
    with pytest.raises(UnknownNameError, match="did you mean 'alpaca'"):
        read_datasets(tmp_path, ("d",))
    with pytest.raises(NotFoundError, match=r"dataset_info.json"):
        read_datasets(tmp_path / "nowhere", ("d",))
