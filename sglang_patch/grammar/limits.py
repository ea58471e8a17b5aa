"""Checks the size of a client's grammar in the frontend, before it reaches the scheduler.

The fields of SGLang 0.5.23's sampling parameters: `json_schema`, `regex`, `ebnf`, `structural_tag`. Each function
raises ValueError, which SGLang answers with status 400. These limits are far above any schema in use. The process that
compiles a grammar limits its actual CPU time and memory (`process.py`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_BYTES = 128 * 1024
MAX_DEPTH = 64
MAX_PROPERTIES = 2_000
MAX_VALUES = 10_000  # in all `enum` lists together
MAX_REPETITIONS = 10_000
MAX_RULES = 2_000
NUM_CHECKED = 32  # cached grammars that are within the limits
SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
ANY_JSON = "$$ANY$$"  # SGLang's name for the grammar of all JSON


def check_grammars(sampling_params: Mapping[str, Any]) -> None:
    """Checks the fields that are set. SGLang's own type checks refuse values that are not strings."""
    for name in ("json_schema", "regex", "ebnf", "structural_tag"):
        spec = sampling_params.get(name)
        if isinstance(spec, str):
            _check_size(name, spec)
            _check(name, spec)


@functools.lru_cache(maxsize=NUM_CHECKED)
def _check(name: str, spec: str) -> None:
    """Cached to run once for all prompts and samples of a request, as it blocks the event loop for milliseconds."""
    CHECKS[name](name, spec)


def check_schema(name: str, text: str) -> None:
    """A JSON schema, or a structural tag, which holds schemas."""
    if text == ANY_JSON:
        return
    depth = _depth(text)
    if depth > MAX_DEPTH:
        raise ValueError(f"{name}: {depth} levels deep; allowed are {MAX_DEPTH}")
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}: is not JSON: {error}") from None
    num_properties = num_values = 0
    ending: set[str] = set()  # references known not to be circular
    for place, part in _objects(schema, "#"):
        num_properties += sum(len(part[key]) for key in SCHEMA_MAPS if isinstance(part.get(key), dict))
        num_values += len(part["enum"]) if isinstance(part.get("enum"), list) else 0
        for key in ("pattern", "regex"):
            if isinstance(part.get(key), str):
                check_regex(f"{name}: {key} at {place}", part[key])
        if isinstance(part.get("$ref"), str):
            _check_reference(name, schema, place, part["$ref"], ending)
    for number, what, most in (
        (num_properties, "properties", MAX_PROPERTIES),
        (num_values, "values in enum lists", MAX_VALUES),
    ):
        if number > most:
            raise ValueError(f"{name}: {number:,} {what}; allowed are {most:,}")


def check_regex(name: str, text: str) -> None:
    """Limits the product of nested repetitions: `(a{1000}){1000}` has a million states."""
    _check_repetitions(name, _most_repetitions(text, quotes=""))


def check_ebnf(name: str, text: str) -> None:
    num_rules = text.count("::=")
    if num_rules > MAX_RULES:
        raise ValueError(f"{name}: {num_rules:,} rules; allowed are {MAX_RULES:,}")
    _check_repetitions(name, _most_repetitions(text, quotes='"'))


CHECKS = {"json_schema": check_schema, "regex": check_regex, "ebnf": check_ebnf, "structural_tag": check_schema}


def _check_repetitions(name: str, largest: int) -> None:
    if largest > MAX_REPETITIONS:
        raise ValueError(
            f"{name}: repeats a part {largest:,} times, nested counts multiplied; allowed are {MAX_REPETITIONS:,}"
        )


def _check_size(name: str, text: str) -> None:
    """Counts characters first, so that a text that is slow or impossible to encode is refused by its length."""
    size = len(text) if len(text) > MAX_BYTES else len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise ValueError(f"{name}: {size:,} bytes; allowed are {MAX_BYTES:,}")
    if re.search("[\ud800-\udfff]", text):
        raise ValueError(f"{name}: holds half of a character (a lone surrogate)")


# An unterminated string extends to the end of the text, so that no part of the text is scanned twice.
_BRACKET_OR_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def _depth(text: str) -> int:
    """Depth of nested brackets in JSON, without parsing, because Python's parser recurses."""
    depth = deepest = 0
    for found in _BRACKET_OR_STRING.finditer(text):
        character = found[0]
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _objects(value: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every JSON object in `value` with its JSON pointer. Recursion is safe, because `MAX_DEPTH` bounds the depth."""
    if isinstance(value, dict):
        yield place, value
        for key, child in value.items():
            if isinstance(child, (dict, list)):
                yield from _objects(child, f"{place}/{str(key)[:40]}")
    elif isinstance(value, list):
        for position, child in enumerate(value):
            if isinstance(child, (dict, list)):
                yield from _objects(child, f"{place}/{position}")


def _check_reference(name: str, root: Any, place: str, reference: str, ending: set[str]) -> None:
    """Follows a chain of references. Raises ValueError for a circular chain, which describes nothing.

    Each reference of a schema is followed once: the references of a checked chain are added to `ending`.
    """
    first, seen = reference, set[str]()
    while reference not in ending:
        if reference in seen:
            raise ValueError(f"{name}: $ref {first!r} at {place} leads back to itself and describes nothing")
        seen.add(reference)
        target = _resolve(root, reference)
        if not isinstance(target, dict) or not isinstance(target.get("$ref"), str):
            break
        reference = target["$ref"]
    ending |= seen


def _resolve(root: Any, reference: str) -> Any:
    """The target of `#/a/b`. None if there is none; the compiler reports this error."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def _most_repetitions(text: str, quotes: str) -> int:
    """The largest product of nested counts `{n}`, `{n,m}` in a regular expression, or in EBNF outside `quotes`.

    Reads from left to right: a group's largest product is known when the group closes, and a count multiplies the
    product of the part before it. `*` and `+` count as one.
    """
    largest = last = 1
    groups: list[int] = []  # for each open group, the largest product found in it so far
    position, end = 0, len(text)
    while position < end:
        character = text[position]
        count = _COUNT.match(text, position) if character == "{" else None
        if count and count[0] not in ("{}", "{,}"):
            last *= _number(count[2] or count[1])
            position = count.end()
        else:
            position = _past(text, position, quotes)
            if character == "(":
                groups.append(1)
                last = 1
                continue
            last = groups.pop() if character == ")" and groups else 1
        largest = max(largest, last)
        if groups:
            groups[-1] = max(groups[-1], last)
    return largest


def _number(digits: str) -> int:
    """The number, capped at a million, which exceeds every limit. Python refuses to parse thousands of digits."""
    digits = digits.lstrip("0")
    return min(int(digits[:7] or "1"), 10**6) if len(digits) < 8 else 10**6


def _past(text: str, position: int, quotes: str) -> int:
    """The position after the character, escape, character class or quoted text at `position`."""
    character = text[position]
    if character == "\\":
        return position + 2
    closing = "]" if character == "[" else character if character in quotes else ""
    position += 1
    if closing:
        while position < len(text) and text[position] != closing:
            position += 2 if text[position] == "\\" else 1
        position += 1
    return position
