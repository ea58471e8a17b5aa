"""Files of rows: every type gives the same rows, and nothing but rows or an error that names the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.cases import examples

from kt_runtime.errors import InvalidValueError, UserError
from kt_runtime.train.data import read_datasets

GOOD = '{"instruction": "q", "output": "a"}'
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
SUFFIXES = [".json", ".jsonl", ".csv", ".parquet", ".arrow"]


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("d.jsonl", f"{GOOD}\n\n{{broken\n".encode(), r"d.jsonl:3: not valid JSON: .*\(column 2\)"),
        ("d.jsonl", f"{GOOD}\n{GOOD[:-1]}\n".encode(), r"d.jsonl:2: not valid JSON: .*\(column 35\)"),
        ("d.jsonl", f"{GOOD} {GOOD}".encode(), r"d.jsonl:1: .*something follows the value"),
        ("d.jsonl", f"{GOOD}\n".encode() + b'{"a": "caf\xe9"}', r"d.jsonl:2: byte 0xe9 is not UTF-8"),
        ("d.jsonl", b"", r"d.jsonl:1: the file is empty"),
        ("d.jsonl", b"\xef\xbb\xbf\r\n", r"d.jsonl:1: the file is empty"),
        ("d.jsonl", GOOD.encode("utf-16"), r"d.jsonl:1: byte 0xff is not UTF-8"),
        ("d.jsonl", b'{"output": NaN}', r"d.jsonl:1: not valid JSON: NaN is not"),
        ("d.jsonl", b'{"output": "\\ud800"}', r"d.jsonl:1: not valid JSON: \\ud800 is half a character"),
        ("d.jsonl", b"[" * 100_000, r"d.jsonl:1: not valid JSON: nested too deeply"),
        ("d.json", f"[{GOOD},\n{GOOD},\n".encode() + b"1" * 9999 + b"]", r"d.json:3: .*digits"),
        ("d.json", f"[\n{GOOD}\n{GOOD}]".encode(), r"d.json:3: not valid JSON: expected '\]'"),
        ("d.json", f"[\n{GOOD},\n]".encode(), r"d.json:3: not valid JSON"),
        ("d.json", f"[\n{GOOD}\n] x".encode(), r"d.json:3: .*something follows"),
        ("d.json", b'[\n{"instruction": "caf\xe9"}]', r"d.json:2: byte 0xe9"),
        ("d.json", b" ", r"d.json:1: the file is empty"),
        ("d.json", b"[]", r"d.json: it holds no rows"),
        ("d.json", f"[{GOOD},\n5]".encode(), r"d.json:2: a row must be a mapping of columns, this is int"),
        ("d.csv", b"instruction,output\nq,a\n\nq,a,b\n", r"d.csv:4: 3 cells, but the first line names 2"),
        ("d.csv", b'instruction,output\n"q\nr",a\n"q" x,a\n', r"d.csv:4: not valid CSV"),
        ("d.csv", b'instruction,output\n"q', r"d.csv:2: not valid CSV"),
        ("d.csv", b"output,output\nq,a", r"d.csv:1: column 'output' is named twice"),
        ("d.csv", b"instruction,output\nq,caf\xe9", r"d.csv:2: byte 0xe9"),
        ("d.csv", b"instruction,output\n", r"d.csv: it holds no rows"),
        ("d.csv", b"", r"d.csv:1: the file is empty"),
        ("d.parquet", b"PAR1 and more", r"d.parquet: cannot be read as parquet"),
        ("d.arrow", b"ARROW1 and more", r"d.arrow: cannot be read as arrow"),
        ("d.arrow", b"", r"d.arrow: cannot be read as arrow"),
        ("d.txt", b"text", r"d.txt: .txt holds text without questions and answers"),
        ("d.xlsx", b"text", r"suffix '.xlsx': datasets are read from .json, "),
    ],
)
def test_broken_files_are_named_with_the_line(datasets: Any, name: str, data: bytes, expected: str) -> None:
    with pytest.raises(InvalidValueError, match=expected):
        datasets.read_rows(data, file_name=name)


@pytest.mark.parametrize(
    ("name", "data", "lines"),
    [
        ("d.jsonl", f"\ufeff{GOOD}\r\n\r\n{GOOD}\r\n", [1, 3]),
        ("d.jsonl", f"[\n{GOOD},\n\n{GOOD}]", [2, 4]),
        ("d.json", f"\ufeff[\r\n{GOOD},\r\n{GOOD}\r\n]\r\n", [2, 3]),
        ("d.json", f"{GOOD}\n{GOOD}", [1, 2]),
        ("D.JSON", f"[{GOOD},{GOOD}]", [1, 1]),
        ("d.csv", '\ufeffinstruction,output\r\n"a\nb",c\r\n\r\nd,e\r\n', [2, 5]),
    ],
)
def test_rows_know_their_line_whatever_the_line_ends(datasets: Any, name: str, data: str, lines: list[int]) -> None:
    made = datasets.read_rows(data.encode(), file_name=name)
    assert [row.where for row in made] == [f"{datasets.directory / name}:{line}" for line in lines]


def write_table(path: Path, rows: list[Any], *, stream: bool = False) -> None:
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    else:
        opened = pyarrow.ipc.new_stream(path, table.schema) if stream else pyarrow.ipc.new_file(path, table.schema)
        with opened as writer:
            writer.write_table(table)


@pytest.mark.parametrize(("name", "stream"), [("d.parquet", False), ("d.arrow", False), ("d.arrow", True)])
def test_tables_are_read_by_row(datasets: Any, name: str, stream: bool) -> None:
    rows = [{"instruction": str(i), "output": "a", "unused": b"\xff", "history": None} for i in range(5)]
    write_table(datasets.directory / name, rows, stream=stream)
    datasets.describe(file_name=name)
    made = datasets.read()
    assert [row.messages[0]["content"] for row in made] == list("01234")
    assert made[4].where == f"{datasets.directory / name}: row 5"


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_table_gives_rows_or_a_users_error(tmp_path: Path, name: str, changes: Any) -> None:
    write_table(tmp_path / name, [{"instruction": "q", "output": "a", "history": [["x", "y"]]}] * 3)
    data = bytearray((tmp_path / name).read_bytes())
    for place, byte in changes:
        data[int(place * len(data))] = byte
    (tmp_path / name).write_bytes(data)
    try:
        assert read_file(tmp_path, name, {})
    except UserError as error:
        assert name in str(error)


def test_a_folder_holds_files_of_one_type(datasets: Any) -> None:
    folder = datasets.directory / "f"
    folder.mkdir()
    datasets.describe(file_name="f")
    with pytest.raises(InvalidValueError, match="f: the folder holds no files"):
        datasets.read()
    for name in ("b.jsonl", "a.json", ".hidden.csv"):
        (folder / name).write_text(GOOD.replace("q", name))
    assert [row.messages[0]["content"] for row in datasets.read()] == ["a.json", "b.jsonl"]
    (folder / "c.csv").write_text("instruction,output\nq,a")
    with pytest.raises(InvalidValueError, match=r"a folder must hold files of one type; b.jsonl and c.csv differ"):
        datasets.read()


def read_file(directory: Path, name: str, entry: dict[str, Any], stage: str = "sft") -> list[Any]:
    (directory / "dataset_info.json").write_text(json.dumps({"d": {"file_name": name, **entry}}))
    recipe: Any = SimpleNamespace(
        stage=stage,
        dataset_dir=directory,
        mix_strategy="concat",
        interleave_probs=None,
        max_samples=None,
        default_system=None,
        mask_history=False,
        seed=0,
        where=lambda key: "recipe.yaml",
    )
    return list(read_datasets(recipe, ("d",), lambda line: None))


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["instruction", "output", "conversations", "from", "value", "tools", "history", "system"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    data=st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | JSON_LIKE.map(lambda v: json.dumps(v).encode())
)
def test_any_bytes_give_rows_or_a_users_error(tmp_path: Path, suffix: str, data: bytes) -> None:
    name = "d" + suffix
    (tmp_path / name).write_bytes(data)
    for formatting in ("alpaca", "sharegpt", "openai"):
        try:
            assert read_file(tmp_path, name, {"formatting": formatting})
        except UserError as error:
            assert name in str(error)


@pytest.mark.parametrize("formatting", ["alpaca", "sharegpt"])
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(row=JSON_LIKE)
def test_any_json_gives_rows_or_a_users_error(tmp_path: Path, formatting: str, row: Any) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    try:
        assert read_file(tmp_path, "d.jsonl", {"formatting": formatting})
    except UserError as error:
        assert "d.jsonl" in str(error)


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(dialogues=st.lists(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), min_size=1, max_size=4), system=TEXT)
def test_conversations_survive_every_format_and_file(
    tmp_path: Path, make_bytes: Callable[[list[Any], str], bytes], suffix: str, dialogues: Any, system: str
) -> None:
    expected = [
        [
            ("system", system),
            *(turn for question, answer in pairs for turn in (("user", question), ("assistant", answer))),
        ]
        for pairs in dialogues
    ]
    for formatting, rows in {
        "alpaca": [
            {
                "system": system,
                "history": [list(pair) for pair in pairs[:-1]],
                "instruction": last[0],
                "output": last[1],
            }
            for pairs in dialogues
            for last in [pairs[-1]]
        ],
        "sharegpt": [
            {
                "system": system,
                "conversations": [
                    {"from": role, "value": text}
                    for pair in pairs
                    for role, text in zip(("human", "gpt"), pair, strict=True)
                ],
            }
            for pairs in dialogues
        ],
        "openai": [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in expected],
    }.items():
        path = tmp_path / f"d{suffix}"
        if suffix in (".parquet", ".arrow"):
            write_table(path, rows)
        else:
            path.write_bytes(make_bytes(rows, suffix))
        made = read_file(tmp_path, path.name, {"formatting": formatting})
        assert [[(m["role"], m["content"]) for m in row.messages] for row in made] == expected
