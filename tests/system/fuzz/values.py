"""Values that a field may get: of the type its JSON schema names, at the edge of it, and of quite another one.

Everything is drawn from the `random.Random` given, so that a seed and a number name an input. Nothing here is larger
than `LARGEST_TEXT` characters: sizes that only a limit can refuse are in `findings.py`, one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from system.fuzz.raw_json import Pairs, Raw

LARGEST_TEXT = 60_000
DEEPEST = 2_000

INTEGERS = [0, -1, 1, 2, 3, 5, 7, 31, 32, 33, 255, 256, 4095, 4096, 4097, 65536]
INTEGERS += [2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1]
INTEGERS += [2**64 - 1, 2**64, 10**30, 10**310]
NUMBERS = [0.0, -0.0, 0.1, 0.5, 0.99, 1.0, 1.0000001, 2.0, -1.0, 1e-7, 1e-45, 1e-320, 3e38, 1e39, 1.7e308, -1e308]
RAW_NUMBERS = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1e-999", b"-0", b"0x10", b"01", b"1.", b"+1"]
RAW_NUMBERS += [b"1" * 400, b"9" * 5000, b"0." + b"3" * 400, b"1e99999999999", b"True", b"undefined"]
STRINGS = [
    "",
    "a",
    "hello",
    "once upon a time",
    "\0",
    "\n",
    "\x7f",
    "null",
    "true",
    "-1",
    "1e999",
    "NaN",
    "é",
    "日本語",
]
STRINGS += ["🧑‍🚀🧑‍🚀", "\u202e\u0000\ufeff", "\ud800", "a\udc00b", "%s%n{}{0.__class__}", "../x", "/dev/zero"]
STRINGS += [
    "__import__('os')",
    "{{ 7*7 }}",
    "<|im_end|>",
    "<s></s>",
    "</think>",
    "<tool_call>{",
    "[TOOL_CALLS]",
    "\\",
    '"',
]
STRINGS += ["data:image/png;base64,AAAA", "file:///etc/hostname", "http://127.0.0.1:9/x.png", "default", "auto", "none"]
KEYS = [
    "",
    "a",
    "0",
    "-1",
    "1",
    "5",
    "9999999999999999999",
    "type",
    "__class__",
    "constructor",
    "$ref",
    "\ud800",
    "é" * 40,
]


class Values:
    """`components`: the schemas that a `$ref` names, as in an OpenAPI document."""

    def __init__(self, randomness: random.Random, components: dict[str, Any]) -> None:
        self.random, self._components = randomness, components

    def one(self, choices: Any) -> Any:
        return self.random.choice(choices)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    # Of no schema.

    def integer(self) -> int:
        return self.one(INTEGERS) + (self.one((-1, 0, 0, 1)) if self.chance(0.3) else 0)

    def number(self) -> Any:
        if self.chance(0.3):
            return Raw(self.one(RAW_NUMBERS))
        return self.one(NUMBERS) if self.chance(0.6) else self.integer()

    def string(self) -> str:
        if self.chance(0.9):
            return str(self.one(STRINGS))
        text = str(self.one(STRINGS)) or " "
        return (text * (self.one((100, 5_000, LARGEST_TEXT)) // len(text) + 1))[:LARGEST_TEXT]

    def anything(self, depth: int = 0) -> Any:
        """Any JSON, most often small."""
        makers: list[Callable[[], Any]] = [
            lambda: None,
            lambda: self.one((True, False)),
            self.integer,
            self.number,
            self.string,
            list,
            dict,
        ]
        if depth < 3:
            makers += [lambda: self.some(lambda: self.anything(depth + 1)), lambda: self.mapping(depth + 1)]
        if depth == 0 and self.chance(0.1):
            return self.deep()
        return self.one(makers)()

    def some(self, make: Callable[[], Any]) -> list[Any]:
        size = self.one((1, 1, 2, 3)) if self.chance(0.95) else self.one((17, 33, 200))
        return [make() for _ in range(size)]

    def mapping(self, depth: int) -> Any:
        items = tuple((self.one(KEYS), self.anything(depth)) for _ in range(self.one((1, 1, 2, 4))))
        return Pairs(items) if self.chance(0.2) else dict(items)

    def deep(self) -> Raw:
        """A document of many levels."""
        depth = self.one((40, 300, 900, DEEPEST))
        opening, closing = self.one(
            ((b"[", b"]"), (b'{"a":', b"}"), (b'{"items":', b"}"), (b'{"properties":{"a":', b"}}"))
        )
        return Raw(opening * depth + b"1" + closing * depth)

    # By a schema.

    def of(self, schema: dict[str, Any], depth: int = 0) -> Any:
        """A value that `schema` allows, as far as it is looked at; numbers and texts often at their edges."""
        schema = self._resolved(schema)
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return self.of(self.one(schema[several]), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.one(schema["enum"])
        return self._of_type(schema, depth)

    def _of_type(self, schema: dict[str, Any], depth: int) -> Any:
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            items = schema.get("items", {})
            return [] if depth > 4 or self.chance(0.05) else self.some(lambda: self.of(items, depth + 1))
        simple: dict[Any, Callable[[], Any]] = {
            "string": self.string,
            "integer": self.integer,
            "number": self.number,
            "boolean": lambda: self.one((True, False)),
            "null": lambda: None,
        }
        return simple.get(kind, lambda: self.anything(depth))()

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        made = {}
        for name, inner in properties.items():
            if name in required or (depth < 4 and self.chance(2 / max(len(properties), 2))):
                made[name] = self.of(inner, depth + 1)
        extra = schema.get("additionalProperties")
        if extra and depth < 4:
            inner = extra if isinstance(extra, dict) else {}
            made |= {str(self.one(KEYS)): self.of(inner, depth + 1) for _ in range(self.one((0, 1, 2)))}
        return made

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._components.get(schema["$ref"].rsplit("/", 1)[-1], {})
        return schema
