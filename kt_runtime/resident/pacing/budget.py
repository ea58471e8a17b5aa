"""What the targets leave for training: the time of the turn between two of the engine's batches.

**Between decode steps.** Every turn in which requests decode gives one token to each of them. The target for the time
per output token (TPOT) is therefore the time that a turn may take, training included. `Budget` keeps the balance: each
such turn adds the target and takes the time that the turn took. A positive balance is what training may use. So the
mean over a request's tokens meets the target, whatever single turns did: a slice that took longer than expected, or a
prompt between two steps, is paid back before training goes on.

The balance never exceeds `MOST_STEPS` targets: a request would see the rest in one long pause. A slice that can't be
cut and needs longer runs when the balance is full; then it is paid back.

**Prefill goes first.** While a request waits for its first token, there is no training.

**Idle.** Without requests, training has all of the time, in turns that are short beside the target for the first token
(TTFT): a request that arrives waits for the rest of a turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kt_runtime.wire.settings import Settings

SERVING_SECONDS = 0.01
"""Budget of a turn between batches if no target is stated."""
IDLE_SECONDS = 0.05
"""Budget of a turn while nothing is served: how long training may delay a request."""
SHARE_OF_FIRST_TOKEN = 0.25
"""Of the target for the first token, at most this share is an idle turn's."""
MARGIN = 0.95
"""The budgets are for this share of the target, since the time between engine and client belongs to it too."""
MOST_STEPS = 4


@dataclass(frozen=True)
class Load:
    """The engine's requests. `decoding`: those that get a token from the next decode step. `waiting`: those without a
    first token, queued or with a part of their prompt computed. `is_serving`: there is any request."""

    decoding: int
    waiting: int
    is_serving: bool


IDLE = Load(0, 0, False)


@dataclass(frozen=True)
class TurnBudget:
    """`seconds`: of slices in this turn. `cuts`: slices are cut to fit. `at_least_one`: one runs even if it does not
    fit. `whole_call`: slices run until a call has ended, however long it takes."""

    seconds: float
    cuts: bool = False
    at_least_one: bool = True
    whole_call: bool = False


NOTHING = TurnBudget(0.0, cuts=True, at_least_one=False)


class Budget:
    """`clock`: monotonic seconds. `settings` may change at any time, for the next turn."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings, self._clock = settings, clock
        self._balance, self._began = 0.0, clock()
        self._was_decoding = False
        self.latest = NOTHING

    @property
    def balance_seconds(self) -> float:
        return self._balance

    def turn(self, load: Load) -> TurnBudget:
        """The budget of the turn that begins now. Call once per turn: it accounts for the turn before."""
        now = self._clock()
        elapsed, self._began = now - self._began, now
        self._account(elapsed, load)
        self.latest = self._budget(load)
        return self.latest

    def _budget(self, load: Load) -> TurnBudget:
        if self.settings.schedule == "whole_calls":
            return TurnBudget(math.inf, whole_call=True)
        if not load.is_serving:
            return self._idle()
        if load.waiting and self.settings.has_target:
            return NOTHING
        if self.settings.tpot_target_ms is None:
            return TurnBudget(SERVING_SECONDS, cuts=self.settings.has_target)
        if not load.decoding:
            return TurnBudget(SERVING_SECONDS, cuts=True)
        if self._balance <= 0:
            return NOTHING
        return TurnBudget(self._balance, cuts=True, at_least_one=self._balance >= self._most)

    @property
    def _target(self) -> float:
        return MARGIN * (self.settings.tpot_target_ms or 0.0) / 1000

    @property
    def _most(self) -> float:
        return MOST_STEPS * self._target

    def _account(self, elapsed: float, load: Load) -> None:
        was_decoding, self._was_decoding = self._was_decoding, load.decoding > 0
        if not load.decoding or self.settings.tpot_target_ms is None:
            self._balance = 0.0  # no request is owed anything
        elif was_decoding:
            self._balance = min(self._most, max(-self._most, self._balance + self._target - elapsed))

    def _idle(self) -> TurnBudget:
        if self.settings.ttft_target_ms is None:
            return TurnBudget(IDLE_SECONDS)
        return TurnBudget(min(IDLE_SECONDS, SHARE_OF_FIRST_TOKEN * self.settings.ttft_target_ms / 1000), cuts=True)
