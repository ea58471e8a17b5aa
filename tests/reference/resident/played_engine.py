"""An engine's loop in played time: requests arrive, prompts and decode steps take what `Costs` says, and a training
session runs in the turns between them, through the real `Budget` and `TrainingScheduler`.

The loop is SGLang's: requests that have arrived join; training's turn; then one batch, the prompts of all that wait or
else one decode step. `Costs` are those of the preset bench-qwen3-moe in bfloat16 on two cores with AVX-512, in seconds.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kt_runtime.resident.pacing.budget import Budget, Load
from kt_runtime.resident.pacing.latencies import quantile
from kt_runtime.resident.scheduler import Slice, TrainingScheduler, Work
from kt_runtime.wire.settings import Settings


@dataclass(frozen=True)
class Costs:
    """`noise`: the relative standard deviation of every duration. `spikes`: the share of slices, steps and prompts that take `spike` times as long."""

    step_base: float = 0.010
    step_experts: float = 0.160
    prompt_base: float = 0.090
    prompt_token: float = 0.0009
    forward: float = 0.000083
    backward: float = 0.00029
    attention_again: float = 0.00004
    attention_backward: float = 0.00006
    forward_attention: float = 0.00002
    forward_part: tuple[float, float] = (0.012, 0.000063)
    backward_part: tuple[float, float] = (0.025, 0.00018)
    noise: float = 0.08
    spikes: float = 0.01
    spike: float = 1.7

    def step(self, streams: int) -> float:
        return self.step_base + self.step_experts * (1 - (15 / 16) ** streams)

    def prompt(self, tokens: int) -> float:
        return self.prompt_base + self.prompt_token * tokens


@dataclass(frozen=True)
class Arrival:
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
    def per_token(self) -> float:
        return (self.last - self.first) / (self.tokens - 1)


@dataclass
class Found:
    """`streams`: finished. `trained`: whole training steps, the last one in part by its least time. `slices`, `busy`: seconds of training and of requests' batches. `seconds`: all."""

    streams: list[Stream] = field(default_factory=list)
    trained: float = 0.0
    slices: float = 0.0
    busy: float = 0.0
    seconds: float = 0.0

    def per_token(self, share: float) -> float:
        return quantile([each.per_token for each in self.streams if each.tokens > 1], share)

    def first_token(self, share: float) -> float:
        return quantile([each.first - each.arrival.at for each in self.streams], share)


class PlayedEngine:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        settings: Settings,
        costs: Costs = Costs(),
        *,
        trains: bool = True,
        seed: int = 0,
        layers: int = 12,
        rows: int = 2,
        row: int = 512,
        most_running: int = 16,
    ) -> None:
        self.now = 100.0
        self._costs, self._chance = costs, random.Random(seed)
        self._arrivals = sorted(arrivals, key=lambda each: each.at)
        self._layers, self._rows, self._row, self._most_running = layers, rows, row, most_running
        self.budget = Budget(settings, self.clock)
        self.scheduler = TrainingScheduler(settings.train_share, self.clock)
        self.trains = trains
        self._start = self.now
        self.waiting: list[Stream] = []
        self.running: list[Stream] = []
        self.found = Found()
        self._useful = 0.0
        self.log: list[tuple[str, int, float]] = []
        n = rows * row
        self._step_least = layers * n * (costs.forward + costs.backward) + self._other()

    def clock(self) -> float:
        return self.now

    def _other(self) -> float:
        return 0.03 + 0.02

    def _takes(self, seconds: float) -> float:
        factor = max(0.5, self._chance.gauss(1.0, self._costs.noise))
        if self._chance.random() < self._costs.spikes:
            factor *= self._costs.spike
        self.now += seconds * factor
        return seconds * factor

    def _slice(self, kind: str, size: int, seconds: float, useful: float) -> None:
        took = self._takes(seconds)
        self.found.slices += took
        self._useful += useful
        self.log.append((kind, size, took))

    # Training, as `training/slices.py` and `twin/parts.py` announce it.

    def _training(self) -> Generator[Slice, int | None, None]:
        costs, n, row = self._costs, self._rows * self._row, self._row
        self._slice("opening", 1, 0.002, 0.002)
        yield Slice("embedding", n, may_switch=True)
        self._slice("embedding", n, 0.001, 0.001)
        for layer in range(self._layers):
            granted = yield Slice("forward experts", n, self._layers - layer, least=row, part="forward attention")
            if granted is None:
                self._slice("forward experts", n, costs.forward * n, costs.forward * n)
                continue
            yield from self._attention(granted, "forward attention", costs.forward_attention)
            yield from self._tokens("forward experts after attention", costs.forward_part, costs.forward - costs.forward_attention)
        for chunk in range(2):
            yield Slice("loss and gradient", n // 2, 1)
            self._slice("loss and gradient", n // 2, 0.01, 0.01)
        for layer in range(self._layers):
            granted = yield Slice("backward experts", n, self._layers - layer, least=row, part="attention again")
            if granted is None:
                self._slice("backward experts", n, costs.backward * n, costs.backward * n)
                continue
            yield from self._attention(granted, "attention again", costs.attention_again)
            yield from self._tokens(
                "backward experts after attention",
                costs.backward_part,
                costs.backward - costs.attention_again - costs.attention_backward,
            )
            for _ in range(self._rows):
                yield Slice("backward attention", row)
                self._slice("backward attention", row, costs.attention_backward * row, costs.attention_backward * row)
            yield Slice("backward masters", n)
            self._slice("backward masters", n, 0.001, 0.0)
        yield Slice("optimizer", 1, may_switch=True)
        self._slice("optimizer", 1, 0.02, 0.02)

    def _attention(self, granted: int, kind: str, each: float) -> Generator[Slice, int | None, None]:
        n, row, first = self._rows * self._row, self._row, 0
        while True:
            rows = min(self._rows - first, max(1, granted // row))
            self._slice(kind, rows * row, each * rows * row, each * rows * row)
            first += rows
            if first == self._rows:
                return
            left = n - first * row
            found = yield Slice(kind, left, least=row, part=kind)
            granted = left if found is None else found

    def _tokens(self, kind: str, part: tuple[float, float], useful: float) -> Generator[Slice, int | None, None]:
        left = self._rows * self._row
        while left:
            found = yield Slice(kind, left, least=min(left, 32), part=kind)
            count = min(left, left if found is None else found)
            self._slice(kind, count, part[0] + part[1] * count, useful * count)
            left -= count

    def _submit(self) -> None:
        self.scheduler.submit(Work("s", self._training(), lambda _: self._submit(), self._failed, Slice("opening", may_switch=True)))

    @staticmethod
    def _failed(error: Exception) -> None:
        raise error

    # The engine.

    def _load(self) -> Load:
        decoding = tuple((self.now - each.first, each.tokens) for each in self.running)
        has_place = len(self.running) < self._most_running
        waiting = self.waiting if has_place else []
        waited = max((self.now - each.arrival.at - self._start for each in waiting), default=0.0)
        tokens = sum(each.arrival.prompt for each in waiting)
        return Load(decoding, len(waiting), bool(self.waiting or self.running), waited, tokens)

    def _join(self) -> None:
        while self._arrivals and self._arrivals[0].at + self._start <= self.now:
            self.waiting.append(Stream(self._arrivals.pop(0)))

    def run(self) -> Found:
        if self.trains:
            self._submit()
            for _ in range(3000):  # one step alone, as the bench's
                self.scheduler.run(self.scheduler.plan(False, self.budget.turn(self._load())), False)
                if self._useful >= self._step_least:
                    break
            self._start, self._useful, self.found = self.now, 0.0, Found()
            self.log.clear()
            self.budget.turn(self._load())
        while self._arrivals or self.waiting or self.running:
            self._turn()
        self.found.seconds = self.now - self._start
        self.found.trained = self._useful / self._step_least
        return self.found

    def _turn(self) -> None:
        load = self._load()
        is_serving = load.is_serving
        plan = self.scheduler.plan(is_serving, self.budget.turn(load)) if self.trains else None
        self._join()
        load = self._load()
        self.budget.batch(load)
        if plan is not None and plan.num_slices and not (self.budget.settings.has_target and load.waiting):
            before = self.now
            self.scheduler.run(plan, is_serving)
            self.budget.ran(self.now - before)
        held = bool(load.waiting and self.running and self.trains) and self.budget.holds(self._load())
        if self.waiting and len(self.running) < self._most_running and not held:
            chosen = self.waiting[: self._most_running - len(self.running)]
            del self.waiting[: len(chosen)]
            self.found.busy += self._takes(self._costs.prompt(sum(each.arrival.prompt for each in chosen)))
            for each in chosen:
                each.first = each.last = self.now
                each.tokens = 1
            self._keep(chosen)
        elif self.running:
            self.found.busy += self._takes(self._costs.step(len(self.running)))
            running, self.running = self.running, []
            for each in running:
                each.tokens, each.last = each.tokens + 1, self.now
            self._keep(running)
        elif not self.trains:
            self.now = max(self.now, self._arrivals[0].at + self._start)

    def _keep(self, streams: Sequence[Stream]) -> None:
        for each in streams:
            if each.tokens >= each.arrival.tokens:
                each.arrival = Arrival(each.arrival.at + self._start, each.arrival.prompt, each.arrival.tokens)
                self.found.streams.append(each)
            else:
                self.running.append(each)


def arrivals(rate: float, seconds: float, seed: int = 0) -> list[Arrival]:
    """As those of `bench interfere`."""
    chance = random.Random(seed)
    found, at = [], 0.0
    while True:
        at += chance.expovariate(rate)
        if at > seconds:
            return found
        lengths = [
            max(low, min(high, round(math.exp(math.log(median) + sigma * chance.gauss(0, 1)))))
            for median, sigma, low, high in ((64, 0.9, 4, 384), (40, 0.6, 8, 128))
        ]
        found.append(Arrival(at, *lengths))
