"""How many cases run of those that show the same: `TEST_CASES` is few (`make test-quick`), usual, or all."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import TypeVar

import pytest

T = TypeVar("T")
CHOICES = ("few", "usual", "all")
CHOICE = os.environ.get("TEST_CASES", "usual")
if CHOICE not in CHOICES:
    raise ValueError(f"TEST_CASES is {CHOICE!r}; allowed: {', '.join(CHOICES)}")


def choose(*, few: T, usual: T, every: T) -> T:
    """The one that the environment asks for."""
    return dict(zip(CHOICES, (few, usual, every), strict=True))[CHOICE]


EACH_RUN_ALIKE = CHOICE != "all"
"""Whether a fuzzed property has the same examples in each run; with all cases they are new ones (`make fuzz-gguf`)."""


def examples(usual: int) -> int:
    """Of a property that names its number: `few` is a quarter of it, at least ten; `all` is ten times as many."""
    return choose(few=max(usual // 4, min(usual, 10)), usual=usual, every=10 * usual)


def position_on_axes(item: pytest.Item) -> dict[str, Hashable]:
    """Of a parametrized test: which value it has on each axis. An axis is one `parametrize`, also of several names
    together, or one parametrized fixture. (pytest's own indices number the cases of a test, not the values.)"""
    params: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    together = [names_of(marker.args[0]) for marker in item.iter_markers("parametrize")]
    alone = [(name,) for name in params.keys() - {name for names in together for name in names}]
    return {",".join(names): tuple(id(params[name]) for name in names) for names in (*together, *alone)}


def names_of(argument: str | Sequence[str]) -> tuple[str, ...]:
    """Of the first argument of `parametrize`: "a, b" or ("a", "b")."""
    return tuple(name.strip() for name in (argument.split(",") if isinstance(argument, str) else argument))


def covering(cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Positions of few of `cases` in which each value of each axis occurs. A case: its value on each axis.

    Of a whole product of axes these are as many as the longest axis has values, not their product.
    """
    missing = {pair for case in cases for pair in case.items()}
    found: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda at: (len(missing & set(cases[at].items())), -at))
        found.append(best)
        missing -= set(cases[best].items())
    return sorted(found)


MOST_VALUES = 3


def spread(number: int) -> list[int]:
    """Positions of at most `MOST_VALUES` of a table's rows, evenly from the first to the last."""
    kept = min(number, MOST_VALUES)
    return [at * (number - 1) // max(kept - 1, 1) for at in range(kept)]


def of_few_values(cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Positions of the cases of one test that have one of few values on each axis. Of a long table these show that
    the test and what it tests work, and not that each row is right."""
    values = {axis: list(dict.fromkeys(case[axis] for case in cases)) for axis in cases[0]}
    kept = {axis: {found[at] for at in spread(len(found))} for axis, found in values.items()}
    return [at for at, case in enumerate(cases) if all(value in kept[axis] for axis, value in case.items())]


def in_pairs(*axes: Iterable[T]) -> list[tuple[T, ...]]:
    """Of all combinations of the axes' values few in which each two values of two axes meet, in their order."""
    cases = list(product(*axes))
    pairs = list(combinations(range(len(axes)), 2))
    return [cases[at] for at in covering([{f"{a},{b}": (case[a], case[b]) for a, b in pairs} for case in cases])]
