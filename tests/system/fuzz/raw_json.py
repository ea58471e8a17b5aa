"""JSON as bytes, also such as no honest writer makes: numbers without bounds, keys twice, text that is no text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Raw:
    """Bytes that are put into the document as they are."""

    content: bytes


@dataclass(frozen=True)
class Pairs:
    """An object by its pairs, in their order; a key may come twice."""

    items: tuple[tuple[str, Any], ...]


def to_json(value: Any) -> bytes:
    """`value` of dicts, lists, scalars, `Raw` and `Pairs`. NaN and infinity are written as Python and JavaScript do."""
    if isinstance(value, Raw):
        return value.content
    if isinstance(value, Pairs):
        return _object(value.items)
    if isinstance(value, dict):
        return _object(value.items())
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(to_json, value)) + b"]"
    if isinstance(value, str):
        # surrogatepass: a lone surrogate becomes three bytes that are not UTF-8.
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return json.dumps(value).encode()


def _object(items: Any) -> bytes:
    return b"{" + b",".join(to_json(str(key)) + b":" + to_json(item) for key, item in items) + b"}"
