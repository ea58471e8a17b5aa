"""The inputs themselves: made again by their number, of every route and kind, and small."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from system.fuzz.asking import Answer, fault_in
from system.fuzz.attack import Journal, read_case, wire_fault, write_case
from system.fuzz.attended import journal, under_way
from system.fuzz.bodies import LEFT_OUT, Bodies, HttpCase, Places
from system.fuzz.clients import post
from system.fuzz.raw_json import Pairs, Raw, to_json
from system.fuzz.room import grown
from system.fuzz.templates import ADAPTERS, BODIES
from system.fuzz.values import Values
from system.fuzz.wire_cases import KINDS, WireCase, WireCases, WirePlaces, _arrays

from kt_runtime.errors import KtError
from kt_runtime.wire import codec

COUNT = 4000
LARGEST_BYTES = 4 << 20
PLACES = Places("model", "/good", ("/bad",))
WIRE_PLACES = WirePlaces("/good", ("/bad",), "/saved", "/new", "/precious")


@pytest.fixture(scope="module")
def openapi() -> dict[str, Any]:
    """As a server's, of the routes that have templates, and one that has none."""
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/components/schemas/Leaf"}}}
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}
    paths = {path: {"post": {"requestBody": {"content": content}}} for path in [*BODIES, "/added/{name}", *LEFT_OUT]}
    leaf = {"anyOf": [{"type": "integer"}, {"enum": ["x"]}, {"type": "array", "items": {"type": "number"}}]}
    return {"paths": paths, "components": {"schemas": {"Body": schema, "Leaf": leaf}}}


@pytest.fixture(scope="module")
def cases(openapi: dict[str, Any]) -> list[HttpCase]:
    bodies = Bodies(openapi, PLACES, seed=1)
    return [bodies.case(index) for index in range(COUNT)]


def test_a_seed_and_a_number_make_the_same_bytes_again(openapi: dict[str, Any], cases: list[HttpCase]) -> None:
    again, other = Bodies(openapi, PLACES, seed=1), Bodies(openapi, PLACES, seed=2)
    assert [again.case(index).wire() for index in range(50)] == [case.wire() for case in cases[:50]]
    assert [other.case(index).wire() for index in range(50)] != [case.wire() for case in cases[:50]]


def test_every_route_is_asked_besides_those_left_out(cases: list[HttpCase]) -> None:
    asked = Counter(case.path for case in cases)
    assert set(BODIES) <= set(asked) and any(path.startswith("/added/") for path in asked)
    assert not set(LEFT_OUT) & set(asked)
    assert asked["/generate"] > COUNT / 10


def test_bodies_are_of_every_kind_and_none_is_large(cases: list[HttpCase]) -> None:
    kinds = Counter(map(_kind, cases))
    assert min(kinds[kind] for kind in ("object", "no JSON", "keys twice", "chunked", "other length")) > 10, kinds
    assert kinds["object"] > COUNT / 2
    assert max(len(case.wire()) for case in cases) < LARGEST_BYTES


def _kind(case: HttpCase) -> str:
    if case.chunks is not None:
        return "chunked"
    if case.length is not None:
        return "other length"
    twice = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in items}) < len(items):
            twice.append(items)
        return dict(items)

    try:
        document = json.loads(case.body, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return "no JSON"
    return "keys twice" if twice else "object" if isinstance(document, dict) else "no object"


def test_words_in_capitals_are_filled_in(cases: list[HttpCase]) -> None:
    sent = b"".join(case.body for case in cases)
    assert b"/good" in sent and b"/bad" in sent and b"MODEL" not in sent and b'"PEFT"' not in sent


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({"a": [1, None, True, "é"]}, '{"a":[1,null,true,"é"]}'.encode()),
        (Pairs((("a", 1), ("a", Raw(b"1e999")))), b'{"a":1,"a":1e999}'),
        ("\ud800", b'"\xed\xa0\x80"'),
        (float("nan"), b"NaN"),
        (10**30, b"1" + b"0" * 30),
    ],
)
def test_json_is_written_as_it_is_said(value: Any, written: bytes) -> None:
    assert to_json(value) == written


def test_messages_are_of_every_kind_good_and_bad() -> None:
    cases = WireCases(WIRE_PLACES, seed=1)
    decoded: Counter[tuple[str, bool]] = Counter()
    for case in map(cases.case, range(COUNT)):
        try:
            codec.decode_request(case.frames)
            decoded[case.kind, True] += 1
        except KtError:
            decoded[case.kind, False] += 1
    assert set(decoded) == {(kind, good) for kind in KINDS for good in (True, False)}
    assert cases.case(7) == WireCases(WIRE_PLACES, seed=1).case(7)


@pytest.mark.parametrize("loss", [{"name": "preference", "kind": "sigmoid"}, {"kind": "ipo"}])
@pytest.mark.parametrize("lengths", [None, 5, "x", [], [-1], [[]], [2**63]])
def test_a_message_is_made_of_wrong_lengths_too(lengths: Any, loss: dict[str, Any]) -> None:
    described, buffers = _arrays(Values(random.Random(1), {}), "forward_backward", lengths, {"loss": loss})
    assert len(described) == len(buffers) >= 3


def test_what_is_precious_is_only_ever_given_to_save() -> None:
    for case in map(WireCases(WIRE_PLACES, seed=1).case, range(COUNT)):
        assert case.kind == "save" or not any(b"/precious" in frame for frame in case.frames)


def test_the_bad_clients_and_the_training_run_share_no_name() -> None:
    for case in map(WireCases(WIRE_PLACES, seed=1).case, range(COUNT)):
        assert not any(b"\xa3run" in frame[:200] for frame in case.frames[1:2])
    assert "steady" not in ADAPTERS


@pytest.mark.parametrize(
    ("status", "body", "wrong"),
    [
        (200, b"{}", None),
        (404, b"no such adapter", None),
        (503, b"busy", None),
        (500, b"oops", "status 500"),
        (302, b"", "status 302"),
        (400, b'  File "/srv/x.py", line 3', "shows"),
        (422, b"Traceback (most recent call last)", "shows"),
        (0, b"", "without an answer"),
        (200, b'data: {"error": {"type": "InternalServerError", "code": 500}}\n\n', "status 200, then"),
    ],
)
def test_answers_are_judged(status: int, body: bytes, wrong: str | None) -> None:
    fault = fault_in(post("case", "/generate", {}), Answer(status, body, 0.1))
    assert (fault is None) if wrong is None else (fault is not None and wrong in fault)


def test_a_path_that_the_client_has_sent_itself_may_come_back() -> None:
    body = b'unknown file: "/x/site-packages/y"'
    assert fault_in(post("case", "/kt/adapters", {"path": "/x/site-packages/y"}), Answer(400, body, 0.1)) is None
    assert fault_in(post("case", "/kt/adapters", {"path": "/x"}), Answer(400, body, 0.1)) is not None


def test_replies_are_judged() -> None:
    assert wire_fault({"type": "done"}) is None
    assert wire_fault({"type": "error", "category": "user", "kind": "ProtocolError", "message": "x"}) is None
    assert wire_fault({"type": "error", "category": "server", "kind": "ServerBusyError", "message": "x"}) is None
    assert wire_fault({"type": "error", "category": "server", "kind": "RuntimeFault", "message": "x"})
    assert wire_fault(None)


def test_an_input_that_was_written_down_is_read_as_it_was_sent(tmp_path: Path, cases: list[HttpCase]) -> None:
    chunked = next(case for case in cases if case.chunks)
    read = read_case(write_case(tmp_path, chunked))
    assert isinstance(read, HttpCase) and read.wire() == chunked.wire() and read.method == chunked.method
    message = WireCases(WIRE_PLACES, seed=1).case(3)
    again = read_case(write_case(tmp_path, message))
    assert isinstance(again, WireCase) and again.frames == message.frames


def test_the_journal_names_what_was_under_way(tmp_path: Path) -> None:
    written = Journal(tmp_path, "http")
    for case, what, when in (("a", "at", 1.0), ("b", "at", 2.0), ("a", "end", 3.0), ("c", "at", 9.0)):
        written.write(case, **{what: when})
    (tmp_path / "wire.jsonl").write_text('{"case": "d", "at": 2.5}\n{"case": "cut o', encoding="utf-8")
    facts = journal(tmp_path)
    assert under_way(facts, 3.5, 5.0) == ["b", "d"]
    assert under_way(facts, 2.0, 2.6) == ["a", "b", "d"]


def test_memory_may_grow_by_a_twentieth() -> None:
    before = {"scheduler": 1000 << 20, "server": 100 << 20}
    assert grown(before, {"scheduler": 1050 << 20, "server": 90 << 20}) == {}
    assert grown(before, {"scheduler": 1051 << 20, "server": 100 << 20}) == {
        "scheduler": "1000 MiB before, 1051 MiB after"
    }
