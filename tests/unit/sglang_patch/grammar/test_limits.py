"""Grammars that no client needs are refused by their text, with the number that is too large and the limit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kt_runtime.sglang_patch.grammar import limits as grammar_limits
from kt_runtime.sglang_patch.grammar.limits import MAX_BYTES, MAX_DEPTH, check_grammars


def nested(levels: int) -> str:
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


def properties(number: int) -> str:
    return json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(number)}})


REFUSED: dict[str, tuple[str, str, str]] = {
    "deep": ("json_schema", nested(900), f"1801 levels deep; allowed are {MAX_DEPTH}"),
    "deep enough to end Python's parser": ("json_schema", "[" * 60_000, "60000 levels deep"),
    "wide": ("json_schema", properties(2_001), "2,001 properties; allowed are 2,000"),
    "wide in parts": (
        "json_schema",
        json.dumps({"$defs": {f"d{i}": json.loads(properties(300)) for i in range(10)}}),
        "3,010 properties",
    ),
    "long list": ("json_schema", json.dumps({"enum": list(range(10_001))}), "10,001 values in enum lists"),
    "itself": ("json_schema", '{"$ref":"#"}', "'#' at # leads back to itself"),
    "two that mean each other": (
        "json_schema",
        '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}',
        "leads back to itself",
    ),
    "no JSON": ("json_schema", "{", "json_schema: is not JSON"),
    "pattern": ("json_schema", '{"pattern":"(a{1000}){1000}"}', "pattern at #: repeats a part 1,000,000 times"),
    "10 MB": ("regex", "a" * 10_000_000, f"10,000,000 bytes; allowed are {MAX_BYTES:,}"),
    "repeated repetition": (
        "regex",
        "(a{1000}){1000}",
        "1,000,000 times, nested counts multiplied; allowed are 10,000",
    ),
    "within alternatives": ("regex", "x(b|(c{2}a{200}|d)){0,100}y", "20,000 times"),
    "5,000 digits": ("regex", "a{" + "9" * 5000 + "}", "repeats a part 1,000,000 times"),
    "EBNF": ("ebnf", 'root ::= (("a" [)]){200} "b"){,100}', "20,000 times"),
    "rules": ("ebnf", "\n".join(f'r{i} ::= "a"' for i in range(2_001)), "2,001 rules; allowed are 2,000"),
    "tag": (
        "structural_tag",
        json.dumps({"format": {"type": "json_schema", "json_schema": json.loads(properties(2_001))}}),
        "structural_tag: 2,001 properties",
    ),
    "half a character": ("regex", "\ud800", "lone surrogate"),
    "many bytes in few characters": ("ebnf", "é" * (MAX_BYTES // 2 + 1), f"allowed are {MAX_BYTES:,}"),
}


@pytest.mark.parametrize(("field", "spec", "said"), REFUSED.values(), ids=REFUSED)
def test_refused_with_number_and_limit(field: str, spec: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_grammars({field: spec})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": "$$ANY$$"},
        {"json_schema": nested(MAX_DEPTH // 2 - 1)},
        {"json_schema": properties(2_000)},
        {"json_schema": '{"type":"object","properties":{"next":{"$ref":"#"},"text":{"type":"string"}}}'},
        {"json_schema": '{"$defs":{"n":{"anyOf":[{"type":"null"},{"$ref":"#/$defs/n"}]}},"$ref":"#/$defs/n"}'},
        {"json_schema": '{"description":"braces in text: [[[[{{{{ \\" ]"}'},
        {"regex": r"\d{4}-\d{2}-\d{2}T(\d{2}:){2}\d{2}\{100000\}[{99999}]"},
        {"regex": "a{10000}"},
        {"ebnf": 'root ::= "{100000}" [a-z]{1,40} ("," [a-z]){0,100}'},
        {"structural_tag": '{"format":{"type":"const_string","value":"x"}}'},
        {"json_schema": None, "regex": None, "temperature": 1},
        {},
    ],
)
def test_what_clients_send_passes(params: dict[str, Any]) -> None:
    check_grammars(params)


def test_each_reference_of_a_chain_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB of references to references took half a minute of the event loop."""
    followed: list[str] = []
    resolve = grammar_limits._resolve

    def counting(root: Any, one: str) -> Any:
        followed.append(one)
        return resolve(root, one)

    monkeypatch.setattr(grammar_limits, "_resolve", counting)
    chain = {str(number): {"$ref": f"#/a/{number + 1}"} for number in range(500)}
    check_grammars({"json_schema": json.dumps({"$ref": "#/a/0", "a": chain})})
    assert sorted(followed) == sorted({f"#/a/{number}" for number in range(501)})
    with pytest.raises(ValueError, match="leads back to itself"):
        check_grammars({"json_schema": json.dumps({"$ref": "#/a/0", "a": chain | {"500": {"$ref": "#/a/7"}}})})


def test_string_without_an_end_is_read_once() -> None:
    found = grammar_limits._BRACKET_OR_STRING.findall('{"a":[' + '"' + '\\"' * 500)
    assert found == ["{", '"a"', "[", '"' + '\\"' * 500]
    assert (
        grammar_limits._depth(
            '[["a]\\"',
        )
        == 2
    )


def test_a_grammar_is_checked_once_for_all_prompts_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setitem(grammar_limits.CHECKS, "regex", lambda _, text: checked.append(text))
    for _ in range(3):
        check_grammars({"regex": "asked for by three prompts"})
    assert checked == ["asked for by three prompts"]
