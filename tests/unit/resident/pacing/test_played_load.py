"""What requests and training get of an engine in played time, under the load of `bench interfere`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from reference.resident.played_engine import Found, PlayedEngine, arrivals

from kt_runtime.resident.pacing import budget
from kt_runtime.resident.pacing.budget import Budget, Load
from kt_runtime.wire.settings import Settings

CAPACITY = 2.29  # requests a second
SECONDS, SEEDS = 40.0, range(6)
FACTOR = 1.25
"""The target is so many times the p99 without training, as in `bench interfere`."""
IDLE = Settings(train_share=0.9)


@functools.cache
def targets(seed: int) -> Settings:
    idle = PlayedEngine(arrivals(CAPACITY / 2, SECONDS, seed), IDLE, trains=False).run()
    return Settings(
        train_share=0.9, tpot_target_ms=1000 * FACTOR * idle.per_token(0.99), ttft_target_ms=2000 * idle.first_token(1)
    )


def played(load: float, seed: int) -> Found:
    return PlayedEngine(arrivals(load * CAPACITY, SECONDS, seed), targets(seed)).run()


def late(load: float = 0.5) -> list[int]:
    """The seeds with a request later than the target for the time per output token."""
    return [seed for seed in SEEDS if 1000 * played(load, seed).per_token(1) > (targets(seed).tpot_target_ms or 0)]


@pytest.mark.parametrize("load", [0.25, 0.5])
def test_every_request_keeps_both_targets(load: float) -> None:
    assert not late(load)
    for seed in SEEDS:
        assert 1000 * played(load, seed).first_token(1) <= (targets(seed).ttft_target_ms or 0)


def test_training_gets_most_of_what_the_load_leaves_without_much_loss_to_cuts() -> None:
    found = [played(0.5, seed) for seed in SEEDS]
    assert sum(each.trained / each.seconds for each in found) / len(found) > 0.4
    assert all(each.trained > 0.93 * each.slices for each in found)


def test_training_alone_keeps_its_speed_where_half_the_target_for_the_first_token_has_room_for_a_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer's backward takes 0.29 s, and half of the target is 0.35 s."""
    stated = Settings(train_share=0.9, tpot_target_ms=100.0, ttft_target_ms=700.0)

    def kept() -> float:
        with_targets, without = (PlayedEngine([], each).alone(60.0) for each in (stated, IDLE))
        return (with_targets.trained / with_targets.seconds) / (without.trained / without.seconds)

    assert kept() > 0.98
    monkeypatch.setattr(budget, "IDLE_SHARE_OF_FIRST_TOKEN", 0.35)
    assert kept() < 0.95


def test_training_goes_on_beside_a_higher_load() -> None:
    assert all(played(0.75, seed).trained > 0.1 * SECONDS for seed in SEEDS)


def test_requests_would_be_late_if_no_prompt_were_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "holds", lambda _budget, _load: False)
    assert late()


def test_requests_would_be_late_if_slices_did_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    slack: Callable[..., float] = Budget._slack
    monkeypatch.setattr(Budget, "_slack", lambda itself, load, *rest: slack(itself, load, *rest) + 0.1)
    assert late()


def test_small_turns_would_lose_training_s_time_to_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MOST_STEPS", 0.3)
    found = [played(0.5, seed) for seed in SEEDS]
    assert all(each.trained < 0.75 * each.slices for each in found)


def test_the_same_load_without_training_is_the_same_engine() -> None:
    """With no session, targets change nothing."""
    coming = arrivals(CAPACITY / 2, SECONDS, 0)
    one, other = (PlayedEngine(coming, settings, trains=False).run() for settings in (IDLE, targets(0)))
    assert [each.last for each in one.streams] == [each.last for each in other.streams]
    assert Budget(targets(0)).turn(Load((), 0, False)).seconds > 0
