"""The choice of few cases, as `make test-quick` runs them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.cases import MOST_VALUES, covering, in_pairs, of_few_values, position_on_axes, spread


def test_of_a_product_as_many_cases_are_kept_as_the_longest_axis_has_values() -> None:
    product = [dict(zip("abc", case, strict=True)) for case in itertools.product(range(5), range(2), range(3))]
    assert len(product) == 30 and len(covering(product)) == 5


@given(st.lists(st.dictionaries(st.sampled_from("ab"), st.integers(0, 4)), max_size=12))
def test_every_value_of_every_axis_is_kept_by_different_cases_in_their_order(cases: list[dict[str, int]]) -> None:
    kept = covering(cases)
    assert kept == sorted({*kept})
    assert {pair for at in kept for pair in cases[at].items()} == {pair for case in cases for pair in case.items()}


def test_a_single_axis_keeps_one_case_of_each_value() -> None:
    assert covering([{"a": 1}, {"a": 2}, {"a": 1}]) == [0, 1]
    assert covering([]) == covering([{}]) == []


@given(st.integers(0, 100))
def test_of_a_long_table_few_rows_are_kept_from_the_first_to_the_last(number: int) -> None:
    kept = spread(number)
    assert len(set(kept)) == len(kept) == min(number, MOST_VALUES)
    assert kept == sorted(kept) and {*kept[:1], *kept[-1:]} == ({0, number - 1} if number else set())
    assert max((b - a for a, b in itertools.pairwise(kept)), default=0) <= number // (MOST_VALUES - 1) + 1


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_a_long_axis_costs_no_value_of_a_short_one(sizes: list[int]) -> None:
    cases = [dict(zip("abc", case, strict=False)) for case in itertools.product(*map(range, sizes))]
    few = [cases[at] for at in of_few_values(cases)]
    kept = [few[at] for at in covering(few)]
    for axis, size in zip("abc", sizes, strict=False):
        assert {case[axis] for case in kept} == set(spread(size))
    assert of_few_values([{}]) == [0]


@given(st.lists(st.integers(1, 5), min_size=2, max_size=3))
def test_each_two_values_of_two_axes_meet(sizes: list[int]) -> None:
    kept = in_pairs(*map(range, sizes))
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(case[a], case[b]) for case in kept} == set(itertools.product(range(sizes[a]), range(sizes[b])))
    assert kept == sorted(set(kept))


def test_pairs_need_no_more_cases_than_the_two_longest_axes_have() -> None:
    assert len(in_pairs(range(3), range(7), range(4))) == 7 * 4


@pytest.fixture(params=["x", "y", "z"])
def letter(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_of_three_axes(number: int, left: int, right: int, letter: str) -> None:
    """Its cases are counted in the next test."""


def test_names_that_are_parametrized_together_are_one_axis(request: pytest.FixtureRequest) -> None:
    module = request.node.parent
    items = [item for item in module.collect() if item.name.startswith(test_of_three_axes.__name__)]
    cases = [position_on_axes(item) for item in items]
    assert len(cases) == 2 * 4 * 3 and {tuple(sorted(case)) for case in cases} == {("left,right", "letter", "number")}
    assert len(covering(cases)) == 4
    assert position_on_axes(request.node) == {}
