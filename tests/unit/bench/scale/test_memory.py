from __future__ import annotations

import pytest

from kt_runtime.bench.scale.memory import MOMENTS, RankMemory, figures_of, ratios_of

RANK = RankMemory(rank=0, weight_bytes=1000, cache_bytes=250, loaded=1350, between_calls=1400, at_peak=1500)


def test_a_ratio_is_what_the_process_takes_above_the_base_over_its_share() -> None:
    assert ratios_of(RANK, 400, with_cache=False) == {"loaded": 0.95, "between_calls": 1.0, "at_peak": 1.1}
    assert ratios_of(RANK, 400, with_cache=True) == {"loaded": 0.76, "between_calls": 0.8, "at_peak": 0.88}


def test_the_rank_that_takes_most_and_the_smallest_base_count() -> None:
    smaller = RankMemory(rank=1, weight_bytes=1000, cache_bytes=250, loaded=1340, between_calls=1450, at_peak=1490)
    found = figures_of([RANK, smaller], [420, 400])
    assert found["base_bytes"] == 400
    assert found["of_weights"] == {"loaded": 0.95, "between_calls": 1.05, "at_peak": 1.1}
    assert [row["rank"] for row in found["rows"]] == [0, 1]
    assert found["rows"][1]["of_weights"] == {"loaded": 0.94, "between_calls": 1.05, "at_peak": 1.09}
    assert found["rows"][1]["of_weights_and_cache"] == {"loaded": 0.752, "between_calls": 0.84, "at_peak": 0.872}


@pytest.mark.parametrize(
    ("base", "is_within"), [(350, True), (349, False)], ids=["the peak at its bar", "the peak above its bar"]
)
def test_bars_hold_for_the_weights_alone(base: int, is_within: bool) -> None:
    found = figures_of([RANK], [base])
    assert found["bars"] == {"loaded": 1.1, "between_calls": 1.15, "at_peak": 1.15}
    assert found["within_bar"] is is_within


def test_while_it_is_loaded_a_rank_may_take_less() -> None:
    full = RankMemory(rank=0, weight_bytes=1000, cache_bytes=0, loaded=1120, between_calls=1120, at_peak=1120)
    found = figures_of([full], [0])
    assert all(found["of_weights"][moment] == 1.12 for moment in MOMENTS)
    assert not found["within_bar"]
