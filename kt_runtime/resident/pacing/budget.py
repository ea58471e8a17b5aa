"""Training's time in a turn between two of the engine's batches, such that requests meet the targets for serving.

**Between decode steps.** A request's time per output token (TPOT) is the mean over its tokens. After n tokens, the next
one is due n targets after the first. The time that remains until then after the next decode step is the request's
slack. Training gets the least slack of all decoding requests. So each request meets its target, however long single
turns took: a slice that was longer than expected, or a prefill between two steps, reduces the slack, and training waits
until decode steps have restored it.

A short request may end before it has recovered from the prefills of others between its steps. So training leaves each
request a reserve: the time of `PROMPTS_LEFT` such prefills, at most `MOST_LEFT_STEPS` targets, or the share `MARGIN` of
the target's time for its tokens so far, whichever is more.

A turn gets at most `MOST_STEPS` targets, since a request sees a turn as one pause. A request that arrives waits for the
turn's end, so with a target for the first token (TTFT) a turn takes at most `SHARE_OF_FIRST_TOKEN` of it. A slice that
can't be cut and takes longer than a turn runs once all requests have slack for the longest turn. `most` tells the
scheduler how long a later turn may be: each part of a slice reads the layer's weights, so a small part that costs much
more per unit than one of that length waits for a longer turn.

**Prefill has priority over training.** While a request waits for its first token, there is no training.

**Held prompts.** If training has used slack, a prefill can delay a decoding request beyond its TPOT target with no time
left to recover. Such a prompt waits while decode steps without training restore the slack, as long as its first token
is expected within `SHARE_OF_HOLDING` of the TTFT target. Prompts that arrive meanwhile are computed in the same batch,
which reads the weights once.

**Idle.** Without requests, training gets all of the time, in turns that are short compared with the TTFT target: a
request that arrives waits for the end of a turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kt_runtime.resident.pacing.estimates import Estimates
from kt_runtime.wire.settings import Settings

SERVING_SECONDS = 0.01
"""Budget of a turn between batches if no target is stated."""
IDLE_SECONDS = 0.05
"""Budget of a turn while nothing is served: how long training may delay a request."""
SHARE_OF_HOLDING = 0.8
"""A prompt is held only while its first token is expected within this share of the target for it."""
SHARE_OF_FIRST_TOKEN = 0.35
"""Largest share of the TTFT target that one turn between decode steps may take."""
IDLE_SHARE_OF_FIRST_TOKEN = 0.5
"""Largest share of the TTFT target that one slice may take while there is no request. It is larger, since a cut slice
takes 6 % longer, and a request that arrives waits for this slice only."""
MARGIN = 0.04
"""Share of the TPOT target that training leaves free: the time between engine and client counts, too."""
MOST_STEPS = 4
PROMPTS_LEFT = 1.5
MOST_LEFT_STEPS = 5
LEARNING = 16
"""The time of a prefill is a running mean over about this number of prefills."""
STEP, PROMPT = "decode step", "prompt"


@dataclass(frozen=True)
class Load:
    """The engine's requests. `decoding`: for each request that gets a token from the next decode step, the seconds
    since its first token, and its tokens so far. `waiting`: number of requests without a first token, queued or with a
    part of their prompt computed. `is_serving`: there is any request. `waited`: seconds for which the longest waiting
    request has waited. `waiting_tokens`: tokens of the waiting requests' prompts."""

    decoding: tuple[tuple[float, int], ...]
    waiting: int
    is_serving: bool
    waited: float = 0.0
    waiting_tokens: int = 0


IDLE = Load((), 0, False)


@dataclass(frozen=True)
class TurnBudget:
    """`seconds`: time for slices in this turn. `cuts`: slices are cut to fit. `longest`: seconds that the turn's first
    slice may take before it is cut, if more than `seconds`. `at_least_one`: one slice runs even if it does not fit.
    `whole_call`: slices run until a call has ended, however long it takes. `most`: seconds that a later turn may have;
    a part that is wasteful compared with one of that length does not run. 0: every part runs."""

    seconds: float
    cuts: bool = False
    at_least_one: bool = True
    whole_call: bool = False
    longest: float = 0.0
    most: float = 0.0


NOTHING = TurnBudget(0.0, cuts=True, at_least_one=False)


class Budget:
    """`clock`: monotonic seconds. `settings` may change at any time, for the next turn.

    Each turn: `turn`, before the requests that have arrived are taken; `batch`, after it; `ran`, if slices ran; and
    `holds`, if prompts wait. Then the engine computes a batch.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings, self._clock = settings, clock
        self._before, self._began, self._trained = IDLE, clock(), 0.0
        self._holds = False
        self._last_trained = -math.inf
        self._costs = Estimates()
        self._prompt_seconds = 0.0
        self._prompts_learned = 0
        self.latest = NOTHING
        self.serving_seconds = 0.0
        """Seconds that the engine has spent on requests since the start: all turns with a request, training
        excluded."""

    def ran(self, seconds: float) -> None:
        """Records the time that slices have taken in the present turn."""
        self._trained += seconds
        if seconds > 0:
            self._last_trained = self._clock()

    def turn(self, load: Load) -> TurnBudget:
        """The budget of the turn that begins now. Call once per turn: it learns from the turn before."""
        now = self._clock()
        self._learn(max(0.0, now - self._began - self._trained), load)
        self._before, self._began, self._trained, self._holds = load, now, 0.0, False
        self.latest = self._budget(load)
        return self.latest

    def batch(self, load: Load) -> None:
        """Records the requests of this turn's batch: `load` includes those that have arrived since `turn`."""
        self._before = load

    def holds(self, load: Load) -> bool:
        """Whether the prompts that wait are held for this turn, so that the requests that decode make a step."""
        self._holds = self._should_hold(load)
        return self._holds

    def _should_hold(self, load: Load) -> bool:
        settings = self.settings
        if settings.schedule != "slices" or settings.tpot_target_ms is None or settings.ttft_target_ms is None:
            return False
        if not load.decoding or not load.waiting:
            return False
        prompts = self._prompts(load.waiting_tokens)
        if load.waited + prompts >= SHARE_OF_HOLDING * settings.ttft_target_ms / 1000:
            return False
        oldest = max(age for age, _ in load.decoding)
        if self._clock() - oldest > self._last_trained:
            return False  # training has taken nothing from these requests
        target = settings.tpot_target_ms / 1000
        if self._step(len(load.decoding)) >= target:
            return False  # steps restore no slack
        return self._slack(load, target) < prompts

    def _learn(self, served: float, load: Load) -> None:
        """Learns from the previous turn. `served`: its seconds without training."""
        before = self._before
        if before.is_serving:
            self.serving_seconds += served
        if before.waiting and not self._holds:
            self._prompts_learned = min(self._prompts_learned + 1, LEARNING)
            self._prompt_seconds += (served - self._prompt_seconds) / self._prompts_learned
            if before.waiting_tokens:
                self._costs.learn(PROMPT, before.waiting_tokens, served)
        elif before.decoding and load.decoding:
            self._costs.learn(STEP, len(before.decoding), served)

    def _budget(self, load: Load) -> TurnBudget:
        if self.settings.schedule == "whole_calls":
            return TurnBudget(math.inf, whole_call=True)
        if not load.is_serving:
            return self._idle()
        if load.waiting and self.settings.has_target:
            return NOTHING
        if self.settings.tpot_target_ms is None or not load.decoding:
            return TurnBudget(SERVING_SECONDS, cuts=self.settings.has_target)
        target = self.settings.tpot_target_ms / 1000
        slack = self._slack(load, target, min(PROMPTS_LEFT * self._prompt_seconds, MOST_LEFT_STEPS * target))
        if slack <= 0:
            return NOTHING
        most = MOST_STEPS * target
        if self.settings.ttft_target_ms is not None:
            most = min(most, SHARE_OF_FIRST_TOKEN * self.settings.ttft_target_ms / 1000)
        return TurnBudget(min(slack, most), cuts=True, at_least_one=slack >= most, most=most)

    def _slack(self, load: Load, target: float, left: float = 0.0) -> float:
        """Smallest slack of all decoding requests after the next step, minus the larger of `left` and the margin."""
        least = min(target * tokens - max(MARGIN * target * tokens, left) - age for age, tokens in load.decoding)
        return least - self._step(len(load.decoding))

    def _step(self, num_requests: int) -> float:
        """Seconds of the next decode step; 0 before the first one."""
        expected = self._costs(STEP, num_requests)
        return 0.0 if math.isinf(expected) else expected

    def _prompts(self, tokens: int) -> float:
        expected = self._costs(PROMPT, tokens)
        return self._prompt_seconds if math.isinf(expected) else expected

    def _idle(self) -> TurnBudget:
        if self.settings.ttft_target_ms is None:
            return TurnBudget(IDLE_SECONDS)
        longest = IDLE_SHARE_OF_FIRST_TOKEN * self.settings.ttft_target_ms / 1000
        return TurnBudget(min(IDLE_SECONDS, longest), cuts=True, longest=longest)
