"""Mixing gives the order of datasets.interleave_datasets, the library whose words the recipe uses."""

from __future__ import annotations

from functools import partial

import pytest

from kt_runtime.train.data.mixing import mix

STOPS = {
    "interleave_under": "first_exhausted",
    "interleave_over": "all_exhausted",
    "interleave_once": "all_exhausted_without_replacement",
}


@pytest.mark.parametrize("strategy", STOPS)
@pytest.mark.parametrize("shares", [None, [0.2, 0.5, 0.3]])
@pytest.mark.parametrize("sizes", [[3, 4, 3], [1, 700, 30], [5, 5, 5]])
def test_rows_come_in_the_librarys_order(strategy: str, shares: list[float] | None, sizes: list[int]) -> None:
    import datasets as library  # a second, for the one process that runs this file

    rows = [[f"{source}:{i}" for i in range(size)] for source, size in enumerate(sizes)]
    theirs = library.interleave_datasets(
        [library.Dataset.from_dict({"x": column}) for column in rows],
        probabilities=shares,
        seed=42,
        stopping_strategy=STOPS[strategy],
    )
    ours = mix([partial(iter, column) for column in rows], strategy, shares, seed=42)
    assert list(ours) == list(theirs["x"])


def test_concat_puts_one_after_the_other() -> None:
    assert list(mix([lambda: iter("ab"), lambda: iter("c")], "concat", None, 0)) == ["a", "b", "c"]
