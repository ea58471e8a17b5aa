from __future__ import annotations

from typing import Any

import pytest

from kt_runtime.bench.scale.plan import Plan
from kt_runtime.errors import InvalidValueError, UnknownNameError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 1}, "--replicas is 1; must be 2 to 64"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"streams": -1}, "--streams is -1"),
        ({"layers": 0}, "--layers is 0"),
        ({"size": "10"}, "--size '10'"),
        ({"size": "1GB"}, "--size 1GB: must be below 1GB"),
        ({"ranks": 1}, "--ranks is 1; must be 2 to 64"),
        ({"replicas": 0}, "--replicas and --ranks are 0: there is nothing to measure"),
        ({"ranks": 2, "rank_streams": (0,)}, "--rank-streams is 0"),
        ({"ranks": 2, "rank_runs": 0}, "--rank-runs is 0"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Plan(**options)


def test_an_unknown_dtype_names_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="float64"):
        Plan(dtype="float64")
