"""Budgets of turns, with a clock in the test's hand."""

from __future__ import annotations

import random

import pytest

from kt_runtime.resident.pacing.budget import (
    IDLE,
    IDLE_SECONDS,
    MARGIN,
    MOST_STEPS,
    NOTHING,
    SERVING_SECONDS,
    SHARE_OF_FIRST_TOKEN,
    Budget,
    Load,
)
from kt_runtime.wire.settings import Settings

DECODING = Load(decoding=4, waiting=0, is_serving=True)
WAITING = Load(decoding=4, waiting=1, is_serving=True)


class Turns:
    """An engine's loop: a turn of training, then a decode step."""

    def __init__(self, **settings: float) -> None:
        self.now = 50.0
        self.budget = Budget(Settings(**settings), lambda: self.now)  # type: ignore[arg-type]

    def turn(self, load: Load, step: float, spend: float | None = None) -> float:
        """The seconds that the turn may spend, which it spends, or `spend` of them; then a step."""
        seconds = self.budget.turn(load).seconds
        self.now += min(seconds, seconds if spend is None else spend) + step
        return seconds


def test_training_gets_what_a_decode_step_leaves_of_the_target() -> None:
    turns = Turns(tpot_target_ms=40)
    turns.turn(DECODING, 0.010)
    began, found = turns.now, [turns.turn(DECODING, 0.010) for _ in range(100)]
    assert sum(found) / 100 == pytest.approx(MARGIN * 0.040 - 0.010, rel=0.03)
    assert (turns.now - began) / 100 == pytest.approx(MARGIN * 0.040, rel=0.03)


@pytest.mark.parametrize("seed", range(10))
def test_the_mean_time_per_token_keeps_to_the_target_whatever_single_turns_take(seed: int) -> None:
    """Steps vary, and slices take up to three times as long as they were expected to."""
    chance, turns = random.Random(seed), Turns(tpot_target_ms=50)
    turns.turn(DECODING, 0.02)
    began = turns.now
    for _ in range(300):
        seconds = turns.budget.turn(DECODING).seconds
        turns.now += seconds * chance.uniform(0.2, 3) + chance.uniform(0.005, 0.045)
    assert (turns.now - began) / 300 <= 0.050 * (1 + MOST_STEPS / 300)


def test_nothing_is_left_where_decoding_alone_takes_longer_than_the_target() -> None:
    turns = Turns(tpot_target_ms=5)
    assert [turns.turn(DECODING, 0.010) for _ in range(20)] == [0.0] * 20


def test_what_is_not_used_is_kept_for_a_slice_that_needs_more_but_not_without_bound() -> None:
    turns = Turns(tpot_target_ms=20)
    found = [turns.turn(DECODING, 0.010, spend=0.0) for _ in range(100)]
    most = MOST_STEPS * MARGIN * 0.020
    assert found[2] > found[1] and max(found) == found[-1] == pytest.approx(most)
    assert turns.budget.turn(DECODING).at_least_one
    turns.now += 1.0  # a slice that can't be cut
    assert turns.budget.turn(DECODING) == NOTHING
    assert turns.budget.balance_seconds == pytest.approx(-most)


def test_prefill_goes_first_and_its_time_is_taken_from_the_balance() -> None:
    turns = Turns(tpot_target_ms=40)
    for _ in range(3):
        turns.turn(DECODING, 0.010, spend=0.0)
    assert turns.turn(WAITING, 0.200) == 0.0
    assert turns.turn(DECODING, 0.010) == 0.0
    assert Turns(ttft_target_ms=100).budget.turn(Load(0, 2, True)) == NOTHING


def test_an_idle_turn_is_short_beside_the_target_for_the_first_token() -> None:
    assert Turns().budget.turn(IDLE).seconds == IDLE_SECONDS
    assert not Turns().budget.turn(IDLE).cuts
    stated = Turns(ttft_target_ms=100).budget.turn(IDLE)
    assert stated.seconds == pytest.approx(SHARE_OF_FIRST_TOKEN * 0.1) and stated.cuts and stated.at_least_one
    assert Turns(ttft_target_ms=10_000).budget.turn(IDLE).seconds == IDLE_SECONDS


def test_a_new_request_is_not_charged_for_the_time_before_it_came() -> None:
    turns = Turns(tpot_target_ms=40)
    for _ in range(5):
        turns.turn(DECODING, 0.100)  # each takes longer than the target
    turns.now += 10
    turns.turn(IDLE, 0.0, spend=0.0)
    turns.turn(DECODING, 0.010)
    assert turns.budget.turn(DECODING).seconds > 0


def test_without_targets_turns_are_as_long_as_ever() -> None:
    found = Turns().budget.turn(DECODING)
    assert (found.seconds, found.cuts, found.at_least_one) == (SERVING_SECONDS, False, True)
    assert Turns().budget.turn(WAITING) == found


def test_targets_that_change_count_from_the_next_turn_on() -> None:
    turns = Turns(tpot_target_ms=11)
    turns.turn(DECODING, 0.010)
    before = turns.turn(DECODING, 0.010)
    turns.budget.settings = Settings(tpot_target_ms=100.0)
    assert turns.turn(DECODING, 0.010) > 5 * max(before, 0.005)


def test_whole_calls_run_without_a_limit() -> None:
    budget = Budget(Settings(schedule="whole_calls", tpot_target_ms=1.0))
    assert budget.turn(WAITING).whole_call and budget.turn(IDLE).whole_call
