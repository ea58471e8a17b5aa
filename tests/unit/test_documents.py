"""Recipes and rule files as text: values that know their line, and nothing that YAML makes of them in secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kt_runtime.documents import LARGEST_BYTES, Entry, Values, plain, read_file, shown, shown_key
from kt_runtime.errors import InvalidValueError, NotFoundError


def entries(tmp_path: Path, text: str | bytes, name: str = "file.yaml") -> tuple[dict[str, Any], list[str]]:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    node = read_file(path, "recipe")
    assert isinstance(node, yaml.MappingNode)
    problems: list[str] = []
    return {entry.key: plain(entry.value) for entry in Values("f", problems).entries(node)}, problems


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.0E-4", 1e-4),
        (".5", 0.5),
        ("8", 8),
        ("-3", -3),
        ("8.0", 8.0),
        ("true", True),
        ("False", False),
        ("", None),
        ("~", None),
        ("null", None),
        ("'8'", "8"),
        ('"true"', "true"),
        # What YAML 1.1 makes a number, a truth value or a date of, and nobody means.
        ("010", "010"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("2026-11-21", "2026-11-21"),
        ("2026-99-99", "2026-99-99"),
        ("[1, [2, a]]", [1, [2, "a"]]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("{}", {}),
        ("[]", []),
    ],
)
def test_a_value_is_what_it_looks_like(tmp_path: Path, text: str, value: Any) -> None:
    read, problems = entries(tmp_path, f"key: {text}\n")
    assert (read, problems) == ({"key": value}, [])
    assert type(read["key"]) is type(value)


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "9" * 5000])
def test_infinity_is_a_number_that_checks_can_refuse(tmp_path: Path, text: str) -> None:
    assert isinstance(entries(tmp_path, f"key: {text}\n")[0]["key"], float)


@pytest.mark.parametrize("name", ["file.json", "file.yaml"])
def test_a_character_that_json_escapes_as_two_is_one(tmp_path: Path, name: str) -> None:
    text = json.dumps({"smile": "a \N{GRINNING FACE}", "half": "\ud83d", "after": 1})
    found, problems = entries(tmp_path, text, name)
    assert found == {"smile": "a \N{GRINNING FACE}", "after": 1}
    assert len(problems) == 1 and "f:1: half: " in problems[0] and "surrogate" in problems[0]


def test_json_is_read_as_json_with_its_lines(tmp_path: Path) -> None:
    text = '{\n\t"a": 1e-4,\n\t"b": "caf\\u00e9 \\/ \\ud83d\\ude00",\n\t"a": 2\n}\n'
    read, problems = entries(tmp_path, text, "file.json")
    assert read["a"] == 1e-4
    assert problems == ["f:4: a stands at f:2 already"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "file.yaml: is empty"),
        (b"# nothing\n", "file.yaml: is empty"),
        (b"a: 1\nb: caf\xe9\n", r"file.yaml:2: byte 0xe9 is not UTF-8; save it as UTF-8"),
        (b"a: 1\nb: \x00\n", r"file.yaml:2: not valid YAML: character 0x0000"),
        (b"a: [1\nb: 2\n", r"file.yaml:2: not valid YAML"),
        (b"a: 1\n\tb: 2\n", r"file.yaml:2: not valid YAML"),
        (b"a: 1\n---\nb: 2\n", r"file.yaml:2: not valid YAML"),
        (b"a: " + b"[" * 1000, "nested too deeply"),
        (b"a: &x [*x]\nb: *y\n", r"file.yaml:2: not valid YAML: found undefined alias"),
        (b"#" * (LARGEST_BYTES + 1), "is larger than"),
    ],
)
def test_what_can_not_be_read_says_where(tmp_path: Path, text: bytes, expected: str) -> None:
    with pytest.raises(InvalidValueError, match=expected):
        entries(tmp_path, text)


def test_a_file_that_is_no_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"none.yaml: no such recipe"):
        read_file(tmp_path / "none.yaml", "recipe")
    with pytest.raises(InvalidValueError, match="can't be read: Is a directory"):
        read_file(tmp_path, "recipe")
    with pytest.raises(InvalidValueError, match="can't be read"):
        read_file(Path("a\0b"), "recipe")
    (tmp_path / "broken.json").write_text('{"a": 1,\n "b": }')
    with pytest.raises(InvalidValueError, match=r"broken.json:2: not valid JSON: Expecting value \(column 7\)"):
        read_file(tmp_path / "broken.json", "recipe")


def test_keys_that_can_not_be_keys_are_problems_and_the_others_are_read(tmp_path: Path) -> None:
    text = "[1, 2]: a\nb: 1\nb: 2\nc: !!python/object/apply:os.system [id]\nd: &x 1\ne: *x\nf: !!set {a}\n"
    read, problems = entries(tmp_path, text)
    assert read == {"b": 1, "d": 1}
    assert problems == [
        "f:1: a key must be text, not a list or mapping",
        "f:3: b stands at f:2 already",
        "f:4: c: the tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed; only text, numbers, lists "
        "and mappings",
        "f:6: e: an alias (*name) is not read here; write the value out",
        "f:7: f: the tag 'tag:yaml.org,2002:set' is not allowed; only text, numbers, lists and mappings",
    ]


def test_nested_mappings_keep_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("a:\n  b: 1\n  c: 2\n")
    node = read_file(path, "recipe")
    assert isinstance(node, yaml.MappingNode)
    (entry,) = Values("f", []).entries(node)
    assert entry == Entry("a", (Entry("b", 1, "f:2"), Entry("c", 2, "f:3")), "f:1")


@pytest.mark.parametrize("key", ["hf_hub_token", "swanlab_api_key", "swanlab_lark_secret", "HUB_TOKEN", "my_password"])
def test_secrets_are_not_shown(key: str) -> None:
    assert shown(key, "hf_very_secret") == "***"
    assert shown(key, {"a": "hf_very_secret"}) == "***"


def test_what_is_shown_is_short_and_printable() -> None:
    assert len(shown("key", "x" * 10_000)) < 100
    assert shown_key("a\nb\x1b[31m") == repr("a\nb\x1b[31m")


@given(st.binary(max_size=300) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_no_bytes_break_it(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    for name in ("file.yaml", "file.json"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(data)
        try:
            node = read_file(path, "recipe")
        except InvalidValueError:
            continue
        problems: list[str] = []
        values = Values("f", problems)
        if isinstance(node, yaml.MappingNode):
            plain(tuple(values.entries(node)))
