"""Budgets of turns, with a clock in the test's hand."""

from __future__ import annotations

import random

import pytest

from kt_runtime.resident.pacing.budget import (
    IDLE,
    IDLE_SECONDS,
    IDLE_SHARE_OF_FIRST_TOKEN,
    MARGIN,
    MOST_LEFT_STEPS,
    MOST_STEPS,
    NOTHING,
    SERVING_SECONDS,
    SHARE_OF_FIRST_TOKEN,
    SHARE_OF_HOLDING,
    Budget,
    Load,
)
from kt_runtime.wire.settings import Settings

KEPT = 1 - MARGIN
STREAM = (0.0, 1)
DECODING = Load((STREAM,) * 4, waiting=0, is_serving=True)
WAITING = Load((STREAM,) * 4, waiting=1, is_serving=True)


class Turns:
    """An engine's loop: a turn of training, then a decode step of all requests. `first`: when each began, `tokens`."""

    def __init__(self, num_requests: int = 4, **settings: float) -> None:
        self.now = 50.0
        self.budget = Budget(Settings(**settings), lambda: self.now)  # type: ignore[arg-type]
        self.first, self.tokens = [self.now] * num_requests, [1] * num_requests

    def join(self) -> None:
        """Another request has its first token."""
        self.first.append(self.now)
        self.tokens.append(1)

    def turn(self, step: float, slower: float = 1.0, waiting: int = 0) -> float:
        """The seconds that training may take, of which it takes `slower` times as many; then a step."""
        streams = tuple((self.now - first, tokens) for first, tokens in zip(self.first, self.tokens, strict=True))
        load = Load(streams, waiting, True)
        seconds = self.budget.turn(load).seconds
        self.budget.batch(load)
        self.budget.ran(seconds * slower)
        self.now += seconds * slower + step
        self.tokens = [tokens + 1 for tokens in self.tokens]
        return seconds

    def per_token(self) -> list[float]:
        return [(self.now - first) / (tokens - 1) for first, tokens in zip(self.first, self.tokens, strict=True)]


def test_training_gets_what_a_decode_step_leaves_of_the_target() -> None:
    turns = Turns(tpot_target_ms=40)
    found = [turns.turn(0.010) for _ in range(100)]
    assert sum(found[1:]) / 99 == pytest.approx(KEPT * 0.040 - 0.010, rel=0.02)
    assert turns.per_token() == [pytest.approx(KEPT * 0.040, rel=5e-15, abs=0)] * 4


@pytest.mark.parametrize("seed", range(10))
def test_every_request_keeps_the_target_though_steps_vary_and_slices_are_late(seed: int) -> None:
    """Slices take up to twice as long as they were expected to. Requests begin at any time."""
    chance, turns = random.Random(seed), Turns(1, tpot_target_ms=50)
    for index in range(400):
        if index % 23 == 0:
            turns.join()
        turns.turn(chance.uniform(0.005, 0.03), slower=chance.uniform(0.2, 2))
    grown = [each for each, tokens in zip(turns.per_token(), turns.tokens, strict=True) if tokens > 10]
    assert len(grown) > 10 and max(grown) <= 0.050
    assert min(grown) >= 0.030, "what is left is used"


def test_nothing_is_left_where_decoding_alone_takes_longer_than_the_target() -> None:
    turns = Turns(tpot_target_ms=5)
    assert [turns.turn(0.010) for _ in range(20)][1:] == [0.0] * 19


def test_the_request_with_the_least_slack_decides() -> None:
    budget = Budget(Settings(tpot_target_ms=100.0), lambda: 0.0)
    target = KEPT * 0.1
    late, early = (target * 10 - 0.02, 10), (0.0, 10)
    assert budget.turn(Load((early, late, early), 0, True)).seconds == pytest.approx(0.02, rel=5e-15, abs=0)
    assert budget.turn(Load((early, (target * 10 + 0.001, 10)), 0, True)) == NOTHING


def test_a_turn_is_never_longer_than_some_steps_and_what_can_t_be_cut_needs_that_much_slack() -> None:
    budget = Budget(Settings(tpot_target_ms=20.0), lambda: 0.0)
    most = MOST_STEPS * 0.020
    found = budget.turn(Load(((0.0, 100),), 0, True))
    assert found.seconds == pytest.approx(most, rel=5e-15, abs=0) and found.at_least_one
    assert not budget.turn(Load(((0.0, 100), (0.0, 1)), 0, True)).at_least_one


def test_prefill_goes_first_and_its_time_is_taken_from_what_is_left() -> None:
    turns = Turns(tpot_target_ms=40)
    for _ in range(3):
        turns.turn(0.010)
    assert turns.turn(0.200, waiting=1) == 0.0
    assert [turns.turn(0.010) for _ in range(5)] == [0.0] * 5
    assert sum(turns.turn(0.010) for _ in range(10)) > 0
    assert Turns(ttft_target_ms=100).budget.turn(Load((), 2, True)) == NOTHING


def test_each_request_keeps_time_for_the_prompts_of_others() -> None:
    """A request of nine tokens that a prompt came into keeps the target, although it can't be paid back."""
    turns = Turns(tpot_target_ms=40)
    for _ in range(20):
        turns.turn(0.030, waiting=1)
    short = Turns(1, tpot_target_ms=40)
    short.budget, short.now = turns.budget, turns.now
    short.first = [short.now]
    trained = sum(short.turn(0.010) for _ in range(6))
    short.turn(0.060, waiting=1)
    short.turn(0.010)
    assert trained > 0.03 and short.per_token() <= [0.040]


def test_the_time_for_prompts_is_a_few_targets_at_most() -> None:
    turns = Turns(tpot_target_ms=40)
    for _ in range(3):
        turns.turn(5.0, waiting=1)
    later = Turns(tpot_target_ms=40)
    later.budget, later.now = turns.budget, turns.now
    later.first = [later.now] * 4
    found = [later.turn(0.010) for _ in range(20)]
    assert not any(found[: MOST_LEFT_STEPS - 1]) and any(found)


def test_a_turn_is_no_longer_than_an_idle_one_where_the_first_token_has_a_target() -> None:
    budget = Budget(Settings(tpot_target_ms=50.0, ttft_target_ms=100.0), lambda: 0.0)
    found = budget.turn(Load(((0.0, 100),), 0, True))
    assert found.seconds == found.most == pytest.approx(SHARE_OF_FIRST_TOKEN * 0.1, rel=2e-15, abs=0)
    assert found.at_least_one


def test_an_idle_turn_is_short_beside_the_target_for_the_first_token() -> None:
    assert Turns().budget.turn(IDLE).seconds == IDLE_SECONDS
    assert not Turns().budget.turn(IDLE).cuts
    stated = Turns(ttft_target_ms=80).budget.turn(IDLE)
    assert stated.seconds == pytest.approx(IDLE_SHARE_OF_FIRST_TOKEN * 0.08, rel=2e-15, abs=0)
    assert stated.cuts and stated.at_least_one
    patient = Turns(ttft_target_ms=10_000).budget.turn(IDLE)
    assert patient.seconds == IDLE_SECONDS
    assert patient.longest == IDLE_SHARE_OF_FIRST_TOKEN * 10, "a slice is cut no smaller than necessary"


def test_without_targets_turns_are_as_long_as_ever() -> None:
    found = Turns().budget.turn(DECODING)
    assert (found.seconds, found.cuts, found.at_least_one) == (SERVING_SECONDS, False, True)
    assert Turns().budget.turn(WAITING) == found


def test_targets_that_change_count_from_the_next_turn_on() -> None:
    turns = Turns(tpot_target_ms=11)
    for _ in range(3):
        turns.turn(0.010)
    turns.budget.settings = Settings(tpot_target_ms=100.0)
    assert turns.turn(0.010) > 0.050


def test_a_prompt_that_arrives_after_the_turn_began_is_no_decode_step() -> None:
    """The engine takes requests after the turn has looked at its load, and computes their prompts in this turn."""
    turns = Turns(tpot_target_ms=40)
    usual = [turns.turn(0.010) for _ in range(10)][-1]
    streams = tuple((turns.now - first, tokens) for first, tokens in zip(turns.first, turns.tokens, strict=True))
    turns.budget.turn(Load(streams, 0, True))
    turns.budget.batch(Load(streams, 1, True, waiting_tokens=100))
    turns.now += 0.100
    turns.first, turns.tokens = [turns.now], [1]
    turns.budget.turn(Load(((0.0, 1),), 0, True))
    grown = Load(((0.0, 100),), 0, True)
    assert turns.budget.turn(grown).seconds == MOST_STEPS * 0.040
    assert usual > 0 and turns.budget.holds(Load(((0.040, 1),), 1, True, waiting_tokens=100)) is False


def holding(**settings: float) -> Turns:
    """After decode steps of 10 ms, and a prompt of 100 tokens and 100 ms; training ran in every turn."""
    turns = Turns(1, **({"tpot_target_ms": 40.0, "ttft_target_ms": 2000.0} | settings))
    for _ in range(5):
        turns.turn(0.010)
    turns.budget.ran(0.001)
    turns.now += 0.001
    turns.budget.turn(Load(((0.0, 9),), 0, True))
    turns.budget.batch(Load(((0.0, 9),), 1, True, waiting_tokens=100))
    turns.now += 0.100
    turns.budget.turn(Load(((0.0, 9),), 0, True))
    return turns


def waits(age: float, tokens: int, waited: float = 0.0) -> Load:
    return Load(((age, tokens),), 1, True, waited, 100)


def test_a_prompt_is_held_while_a_request_could_not_be_paid_back_for_it() -> None:
    budget = holding().budget
    near = 10 * KEPT * 0.040 - 0.010  # what ten tokens leave beside the next step
    assert budget.holds(waits(near - 0.09, 10)) and not budget.holds(waits(near - 0.11, 10))


def test_a_prompt_is_held_while_its_first_token_is_expected_within_a_share_of_the_target() -> None:
    budget = holding().budget
    most = SHARE_OF_HOLDING * 2.0 - 0.1  # the prompt itself takes 100 ms
    assert budget.holds(waits(0.38, 10, most - 0.01)) and not budget.holds(waits(0.38, 10, most + 0.01))


def test_a_prompt_is_not_held_without_both_targets_or_without_training_or_where_steps_give_no_slack() -> None:
    late = waits(0.38, 10)
    assert holding().budget.holds(late)
    assert not holding(tpot_target_ms=9.0).budget.holds(late), "a step takes longer than the target"
    turns = holding()
    turns.budget.settings = Settings(tpot_target_ms=40.0)
    assert not turns.budget.holds(late)
    turns = holding()
    turns.now += 5.0
    assert not turns.budget.holds(late), "the request began after training's last slice"
    assert not turns.budget.holds(Load((), 1, True, 0.0, 100)), "nothing would run"
    assert not turns.budget.holds(Load(((0.38, 10),), 0, True))


def test_a_turn_that_holds_prompts_is_a_decode_step() -> None:
    """Else its time would count as a prompt's, and short prompts would be held no longer."""
    turns = holding()
    for _ in range(20):
        turns.budget.turn(waits(0.38, 10))
        turns.budget.batch(waits(0.38, 10))
        assert turns.budget.holds(waits(0.38, 10))
        turns.budget.ran(0.001)
        turns.now += 0.010
    assert turns.budget.holds(waits(10 * KEPT * 0.040 - 0.010 - 0.09, 10))


def test_whole_calls_run_without_a_limit() -> None:
    budget = Budget(Settings(schedule="whole_calls", tpot_target_ms=1.0))
    assert budget.turn(WAITING).whole_call and budget.turn(IDLE).whole_call


def test_the_time_of_serving_is_that_of_turns_with_requests_without_training() -> None:
    turns = Turns()
    for load, training, step in [(IDLE, 0.05, 1.0), (DECODING, 0.01, 0.02), (WAITING, 0.0, 0.3), (IDLE, 0.05, 5.0)]:
        turns.budget.turn(load)
        turns.budget.ran(training)
        turns.now += training + step
    turns.budget.turn(IDLE)
    assert turns.budget.serving_seconds == pytest.approx(0.32, rel=3e-14, abs=0)  # 5e-15 measured
