"""Finds the structs of a body at a path such as ".messages[0].content[1]"."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from kt_runtime.serve.requests.bodies.bounds import Body

_type_info = functools.cache(msgspec.inspect.type_info)  # half a millisecond or more
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")


def steps(place: str) -> Iterator[str | int | None]:
    """The path's field names and list positions; None: any value of an object with the client's own keys."""
    for key, index in _STEP.findall(place):
        yield key or (None if index == "..." else int(index))


def structs_at(body_type: type[Body], place: str) -> list[Any]:
    """The struct types allowed at `place`."""
    kinds = [_type_info(body_type)]
    for step in steps(place):
        kinds = [inner for kind in kinds for inner in _inside(kind, step)]
    return [kind.cls for kind in _flat(kinds) if isinstance(kind, msgspec.inspect.StructType)]


def _inside(kind: Any, step: str | int | None) -> Iterator[Any]:
    for one in _flat([kind]):
        if isinstance(one, msgspec.inspect.StructType) and isinstance(step, str):
            yield from (field.type for field in one.fields if field.encode_name == step)
        elif isinstance(one, msgspec.inspect.ListType) and isinstance(step, int):
            yield one.item_type
        elif isinstance(one, msgspec.inspect.DictType) and step is None:
            yield one.value_type


def _flat(kinds: list[Any]) -> Iterator[Any]:
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.UnionType):
            yield from _flat(list(kind.types))
        elif isinstance(kind, msgspec.inspect.Metadata):
            yield from _flat([kind.type])
        else:
            yield kind
