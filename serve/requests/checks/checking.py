"""Parses a body's bytes into one of this package's structs, or raises a Refusal that names the field and the error."""

from __future__ import annotations

import collections
import difflib
import json
import re
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
import orjson

from kt_runtime.serve.requests.bodies.bounds import Body
from kt_runtime.serve.requests.bodies.free_json import decode
from kt_runtime.serve.requests.bodies.structs import steps, structs_at
from kt_runtime.serve.requests.checks.normal_form import normal_form
from kt_runtime.serve.requests.checks.refusal import Refusal

SHOWN_CHARACTERS, SHOWN_ENTRIES = 60, 8
# Each object costs Python some microseconds; a million objects would block the event loop for seconds.
MAX_OBJECTS = 50_000
_B = TypeVar("_B", bound=Body)

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$?(.*)`)?$", re.DOTALL)
_AT = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<place>.*)`| - at `key` in `\$(?P<key_of>.*)`)?$", re.DOTALL)


def parsed(body: bytes, body_type: type[_B]) -> tuple[_B, bytes]:
    """The struct and the body for SGLang: the client's bytes, or the bytes of the body's `normal_form`.

    Raises Refusal (400) for invalid JSON, a duplicate key, or a body that does not fit `body_type`.
    """
    value = read_json(body)
    if not isinstance(value, dict):
        raise Refusal(400, f"the body must be a JSON object, not {shortened(value)}")
    normal = normal_form(value, body_type)
    request = fitted(normal, body_type)
    return request, body if normal is value else orjson.dumps(normal)


def parse_query(query: bytes, query_type: type[_B]) -> _B:
    """As `parse`, for the query string."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    return fitted(_Objects().distinct(pairs), query_type, strict=False)


def fitted(value: dict[str, Any], body_type: type[_B], *, strict: bool = True) -> _B:
    """The struct of parsed JSON. Raises Refusal (400)."""
    try:
        return msgspec.convert(value, body_type, strict=strict, dec_hook=decode)
    except msgspec.ValidationError as error:
        raise explained(str(error), value, body_type) from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deep") from None


def read_json(body: bytes) -> Any:
    """Parses JSON like SGLang (orjson), but refuses an object with a duplicate key."""
    try:
        json.loads(body.decode(), object_pairs_hook=_Objects().distinct)
        return orjson.loads(body)
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not valid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deep") from None
    except ValueError as error:  # both parsers' errors are ValueErrors
        raise Refusal(400, f"the body is not valid JSON: {str(error)[:200]}") from None


class _Objects:
    """Called for each parsed object of a body. Raises Refusal for a duplicate key, and for too many objects."""

    def __init__(self) -> None:
        self._num_seen = 0

    def distinct(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._num_seen += 1
        if self._num_seen > MAX_OBJECTS:
            raise Refusal(400, f"the body has more than {MAX_OBJECTS} JSON objects")
        found = dict(pairs)
        if len(found) != len(pairs):
            counts = collections.Counter(key for key, _ in pairs)
            twice = counts.most_common(1)[0][0]
            raise Refusal(400, f"the body has the key {shortened(twice)} twice in one object", field=twice[:100])
        return found


def explained(message: str, value: Any, body_type: type[Body]) -> Refusal:
    """A Refusal from msgspec's error message, with the field's name, its value and a hint."""
    unknown = _UNKNOWN_FIELD.match(message)
    if unknown:
        return _unknown_field(unknown[1], unknown[2] or "", value, body_type)
    found = _AT.match(message)
    assert found is not None
    what, place, key_of = found["what"], found["place"] or "", found["key_of"]
    if key_of is not None:
        return Refusal(400, f"{_named(key_of)}: a key is wrong: {what}", field=_named(key_of))
    missing = re.match(r"Object missing required field `(.*)`", what)
    if missing:
        return Refusal(400, f"{_named(place + '.' + missing[1])} is missing", field=_named(place + "." + missing[1]))
    where = _named(place) or "the body"
    at = _value_at(value, place)
    shown = "" if at is _NOWHERE else f" {shortened(at)}"
    return Refusal(400, f"{where}{shown}: {what[:300]}", field=_named(place) or None)


def _unknown_field(name: str, place: str, value: Any, body_type: type[Body]) -> Refusal:
    where = _named(f"{place}.{name}")
    bodies = list(structs_at(body_type, place))
    reason = next((body.left_out[name] for body in bodies if name in getattr(body, "left_out", {})), None)
    if reason:
        return Refusal(400, f"{where[:200]} is not available under kt-runtime: {reason}", field=where[:100])
    holder = _value_at(value, place)
    shown = f" ({shortened(holder[name])})" if isinstance(holder, dict) and name in holder else ""
    known = sorted({field.encode_name for body in bodies for field in msgspec.structs.fields(body)})
    near = difflib.get_close_matches(name[:100], known, n=3)
    listed = ", ".join(known[:20]) + (f", ... ({len(known)} in all)" if len(known) > 20 else "")
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; known: {listed}"
    return Refusal(400, f"unknown field {shortened(where)}{shown}{hint}", field=where[:100], code="unknown_field")


def shortened(value: Any) -> str:
    """The start of a value as JSON, and its length."""
    if isinstance(value, str):
        text = repr(value[: SHOWN_CHARACTERS + 1])
        return text if len(value) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(value)} characters)"
    if isinstance(value, list | dict) and len(value) > SHOWN_ENTRIES:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except RecursionError:
        return "a deep value"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


_NOWHERE = object()


def _named(place: str) -> str:
    return place.removeprefix("$").removeprefix(".")


def _value_at(value: Any, place: str) -> Any:
    for step in steps(place):
        try:
            value = _NOWHERE if step is None else value[step]
        except (LookupError, TypeError):
            return _NOWHERE
        if value is _NOWHERE:
            return value
    return value
