"""An engine's loop in played time: requests arrive, prompts and decode steps take what `Costs` says, and a training
session runs in the turns between them, through the real `Budget` and `TrainingScheduler`.

The loop is SGLang's: the turn looks at the engine's load; requests that have arrived join; training's slices; then one
batch, the prompts of all that wait or else one decode step. Everything is drawn from seeds: no test depends on time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from kt_runtime.resident.pacing.budget import Budget, Load
from kt_runtime.resident.pacing.latencies import quantile
from kt_runtime.resident.scheduler import Slice, TrainingScheduler, Work
from kt_runtime.wire.settings import Settings


@dataclass(frozen=True)
class Costs:
    """Seconds on two cores with AVX-512, of the preset bench-qwen3-moe in bfloat16.

    Steps and prompts are fitted to `bench interfere` (2026-11-27-xeon-avx512-interfere, idle rows): steps read the
    distinct ones of 64 experts, four per token. Slices: per token of a layer, the whole and its parts; `..._part`: of
    the tokens after attention, what reading the weights takes, and each token. Their proportions are of a traced run.

    `noise`: the relative standard deviation of every duration. `spikes`: the share of those that take `spike` times as
    long.
    """

    step_base: float = 0.0143
    step_experts: float = 0.084
    prompt_base: float = 0.074
    prompt_token: float = 0.00126
    forward: float = 0.000104
    backward: float = 0.000282
    forward_attention: float = 0.000053
    attention_again: float = 0.000062
    attention_backward: float = 0.000082
    forward_part: tuple[float, float] = (0.008, 0.000048)
    backward_part: tuple[float, float] = (0.018, 0.000142)
    noise: float = 0.06
    spikes: float = 0.01
    spike: float = 1.7

    def step(self, streams: int) -> float:
        return self.step_base + self.step_experts * (1 - (15 / 16) ** streams)

    def prompt(self, tokens: int) -> float:
        return self.prompt_base + self.prompt_token * tokens


@dataclass(frozen=True)
class Arrival:
    """`at`: seconds from the beginning. `prompt`, `tokens`: of the prompt and of the answer."""

    at: float
    prompt: int
    tokens: int


@dataclass
class Stream:
    arrival: Arrival
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    @property
    def first_token(self) -> float:
        return self.first - self.arrival.at

    @property
    def per_token(self) -> float:
        return (self.last - self.first) / (self.tokens - 1)


@dataclass
class Found:
    """`streams`: of the requests, all finished. `seconds`: from their beginning until the last one's end; of them,
    `slices`: of training, `busy`: of requests' batches. `trained`: the seconds that the same training takes alone."""

    streams: list[Stream] = field(default_factory=list)
    seconds: float = 0.0
    slices: float = 0.0
    busy: float = 0.0
    trained: float = 0.0

    def per_token(self, share: float) -> float:
        return quantile([each.per_token for each in self.streams], share)

    def first_token(self, share: float) -> float:
        return quantile([each.first_token for each in self.streams], share)


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson, with lengths as those of `bench interfere`."""
    chance = random.Random(seed)
    found: list[Arrival] = []
    at = 0.0
    while (at := at + chance.expovariate(rate)) <= seconds:
        prompt, tokens = (
            max(low, min(high, round(math.exp(math.log(median) + sigma * chance.gauss(0, 1)))))
            for median, sigma, low, high in ((64, 0.9, 4, 384), (40, 0.6, 8, 128))
        )
        found.append(Arrival(at, prompt, tokens))
    return found


class PlayedEngine:
    """Training steps of `rows` sequences of `row` tokens through `layers` layers follow each other without a pause."""

    layers, rows, row, most_running = 12, 2, 512, 16

    def __init__(
        self, coming: Sequence[Arrival], settings: Settings, *, trains: bool = True, costs: Costs | None = None
    ) -> None:
        self.now = 0.0
        self._costs, self._chance = costs or Costs(), random.Random(len(coming))
        self._coming = sorted(coming, key=lambda each: each.at)
        self._trains, self._began = trains, 0.0
        self._waiting: list[Stream] = []
        self._running: list[Stream] = []
        self.found = Found()
        self.budget = Budget(settings, self._clock)
        self.scheduler = TrainingScheduler(settings.train_share, self._clock)

    def run(self) -> Found:
        if self._trains:
            self._submit()
            self._alone()
        while self._coming or self._waiting or self._running:
            self._turn()
        self.found.seconds = self.now - self._began
        return self.found

    def alone(self, seconds: float) -> Found:
        """Training without a request, after its first step."""
        self._submit()
        self._alone()
        while self.now - self._began < seconds:
            self._turn()
        self.found.seconds = self.now - self._began
        return self.found

    def _clock(self) -> float:
        return self.now

    def _takes(self, seconds: float) -> float:
        factor = max(0.5, self._chance.gauss(1.0, self._costs.noise))
        factor *= self._costs.spike if self._chance.random() < self._costs.spikes else 1.0
        self.now += seconds * factor
        return seconds * factor

    def _alone(self) -> None:
        """A step before the first request, whose slices tell what slices cost."""
        while not self.scheduler.calls_ended:
            self.scheduler.run(self.scheduler.plan(False, self.budget.turn(self._load())), False)
        self._began, self.found = self.now, Found()
        self._coming = [Arrival(each.at + self._began, each.prompt, each.tokens) for each in self._coming]
        self.budget.turn(self._load())

    # The engine.

    def _load(self) -> Load:
        decoding = tuple((self.now - each.first, each.tokens) for each in self._running)
        waiting = self._waiting if len(self._running) < self.most_running else []
        return Load(
            decoding,
            len(waiting),
            bool(self._waiting or self._running),
            max((self.now - each.arrival.at for each in waiting), default=0.0),
            sum(each.arrival.prompt for each in waiting),
        )

    def _turn(self) -> None:
        load = self._load()
        plan = self.scheduler.plan(load.is_serving, self.budget.turn(load)) if self._trains else None
        while self._coming and self._coming[0].at <= self.now:
            self._waiting.append(Stream(self._coming.pop(0)))
        joined = self._load()
        self.budget.batch(joined)
        if plan is not None and plan.num_slices and not (self.budget.settings.has_target and joined.waiting):
            before = self.now
            self.scheduler.run(plan, load.is_serving)
            self.budget.ran(self.now - before)
        holds = self._trains and bool(self._running) and self.budget.holds(self._load())
        chosen = [] if holds else self._waiting[: self.most_running - len(self._running)]
        if chosen:
            self._prompts(chosen)
        elif self._running:
            self._step()
        elif not self._trains:
            self.now = max(self.now, self._coming[0].at)

    def _prompts(self, chosen: list[Stream]) -> None:
        del self._waiting[: len(chosen)]
        self.found.busy += self._takes(self._costs.prompt(sum(each.arrival.prompt for each in chosen)))
        for each in chosen:
            each.first, each.last, each.tokens = self.now, self.now, 1
        self._running += chosen

    def _step(self) -> None:
        self.found.busy += self._takes(self._costs.step(len(self._running)))
        for each in self._running:
            each.last, each.tokens = self.now, each.tokens + 1
        self.found.streams += [each for each in self._running if each.tokens == each.arrival.tokens]
        self._running = [each for each in self._running if each.tokens < each.arrival.tokens]

    # Training, as `training/slices.py` and `twin/parts.py` announce it.

    def _submit(self) -> None:
        def failed(error: Exception) -> None:
            raise error

        self.scheduler.submit(Work("s", self._call(), lambda _: self._submit(), failed, Slice("opening")))

    def _slice(self, seconds: float, alone: float | None = None) -> None:
        """`alone`: what it is worth, if it is a part: the seconds in which the whole does as much."""
        self.found.slices += self._takes(seconds)
        self.found.trained += seconds if alone is None else alone

    def _call(self) -> Generator[Slice, int | None, None]:
        costs, tokens = self._costs, self.rows * self.row
        self._slice(0.002)
        for layer in range(self.layers):
            left = self.layers - layer
            granted = yield Slice("forward experts", tokens, left, least=self.row, part="forward attention")
            if granted is None:
                self._slice(costs.forward * tokens)
                continue
            each, rest = costs.forward_attention, costs.forward - costs.forward_attention
            yield from self._attention("forward attention", each, granted)
            yield from self._tokens("forward experts after attention", costs.forward_part, rest)
        yield Slice("loss and gradient", tokens)
        self._slice(0.04)
        for layer in range(self.layers):
            left = self.layers - layer
            granted = yield Slice("backward experts", tokens, left, least=self.row, part="attention again")
            if granted is None:
                self._slice(costs.backward * tokens)
                continue
            rest = costs.backward - costs.attention_again - costs.attention_backward
            rows = yield from self._attention("attention again", costs.attention_again, granted)
            yield from self._tokens("backward experts after attention", costs.backward_part, rest)
            for each_rows in rows:
                yield Slice("backward attention", each_rows * self.row)
                self._slice(costs.attention_backward * each_rows * self.row)
        yield Slice("optimizer step", 1, may_switch=True)
        self._slice(0.02)

    def _attention(self, kind: str, each: float, granted: int) -> Generator[Slice, int | None, list[int]]:
        """Returns the rows of each part."""
        parts: list[int] = []
        while True:
            parts.append(min(self.rows - sum(parts), max(1, granted // self.row)))
            self._slice(each * parts[-1] * self.row)
            left = (self.rows - sum(parts)) * self.row
            if not left:
                return parts
            found = yield Slice(kind, left, least=self.row, part=kind)
            granted = left if found is None else found

    def _tokens(self, kind: str, part: tuple[float, float], alone: float) -> Generator[Slice, int | None, None]:
        left = self.rows * self.row
        while left:
            found = yield Slice(kind, left, least=min(left, 32), part=kind)
            count = left if found is None else min(left, found)
            self._slice(part[0] + part[1] * count, alone * count)
            left -= count
