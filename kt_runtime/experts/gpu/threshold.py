"""Finds the number of tokens from which on streaming a layer's experts to the device is faster than the CPU.

Streaming takes about the same time for any number of tokens, since the copies take it; the CPU's time grows with them.
Both are measured with a layer of the model, for growing numbers of tokens, until streaming is no slower. Between the
last two numbers both times are interpolated linearly. If measuring would take too long, they are extrapolated instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kt_runtime import device as devices
from kt_runtime.experts.gpu import staging, streamed
from kt_runtime.experts.gpu.call import ExpertCall
from kt_runtime.experts.gpu.paths import PathedLayer
from kt_runtime.experts.gpu.ring import ExpertRing

FEWEST_TOKENS = 16
RUNS = 2
MOST_SECONDS = 20.0
"""A larger number of tokens is tried only before this time is over."""


@dataclass(frozen=True)
class Timed:
    """Seconds of one layer."""

    tokens: int
    streamed: float
    cpu: float


@dataclass(frozen=True)
class Crossover:
    """`tokens`: the threshold; None: streaming was slower for every number that was tried. `timed`: what was tried."""

    tokens: int | None
    timed: tuple[Timed, ...]


def crossover(
    streamed_seconds: Callable[[int], float],
    cpu_seconds: Callable[[int], float],
    most_tokens: int,
    is_over: Callable[[], bool] = lambda: False,
) -> Crossover:
    """Tries 16, 32, ... and finally `most_tokens` tokens. The functions give the seconds for a number of tokens.

    `is_over`: asked after each number; True: no further one is tried.
    """
    timed: list[Timed] = []
    for tokens in _counts(most_tokens):
        timed.append(Timed(tokens, streamed_seconds(tokens), cpu_seconds(tokens)))
        if timed[-1].streamed <= timed[-1].cpu:
            return Crossover(_between(timed), tuple(timed))
        if is_over():
            break
    return Crossover(_beyond(timed, most_tokens), tuple(timed))


def measured(ring: ExpertRing, layer: PathedLayer, top_k: int, dtype: torch.dtype, most_tokens: int) -> Crossover:
    """`crossover` of a layer with random tokens of `dtype`, each with `top_k` experts. Takes about
    `MOST_SECONDS` at most."""

    def seconds(run: Callable[[ExpertCall], object]) -> Callable[[int], float]:
        return lambda tokens: _best(lambda call: run(call), _drawn(ring, tokens, top_k, dtype), ring.device)

    def on_device(call: ExpertCall) -> None:
        streamed.forward(ring, layer, call, None, retain=False)

    def on_cpu(call: ExpertCall) -> None:
        if devices.is_host(call.x):
            layer.forward(call.x, call.ids, call.weights)
        else:
            staging.forward(layer, call, None, retain=False)

    end = time.perf_counter() + MOST_SECONDS
    return crossover(seconds(on_device), seconds(on_cpu), most_tokens, lambda: time.perf_counter() > end)


def _counts(most_tokens: int) -> Iterator[int]:
    tokens = FEWEST_TOKENS
    while tokens < most_tokens:
        yield tokens
        tokens *= 2
    yield most_tokens


def _between(timed: list[Timed]) -> int:
    """Where streaming stops being slower: at the last number, or between it and the one before."""
    last = timed[-1]
    if len(timed) == 1:
        return last.tokens
    before = timed[-2]
    slower, faster = before.streamed - before.cpu, last.cpu - last.streamed
    return before.tokens + math.ceil((last.tokens - before.tokens) * slower / (slower + faster))


def _beyond(timed: list[Timed], most_tokens: int) -> int | None:
    """Where the lines through the last two numbers cross, if they do between the last and `most_tokens`."""
    last, before = timed[-1], timed[-2] if len(timed) > 1 else Timed(0, timed[-1].streamed, 0.0)
    gained = (last.cpu - last.streamed) - (before.cpu - before.streamed)
    if gained <= 0:
        return None
    more = (last.tokens - before.tokens) * (last.streamed - last.cpu) / gained
    return last.tokens + math.ceil(more) if last.tokens + more <= most_tokens else None


def _drawn(ring: ExpertRing, tokens: int, top_k: int, dtype: torch.dtype) -> ExpertCall:
    """Random tokens; each one's experts are distinct. Made while a model is loaded, when defaults are the model's."""
    generator = torch.Generator("cpu").manual_seed(tokens)
    x = torch.randn(tokens, ring.shape.hidden, generator=generator, device="cpu").to(dtype)
    scores = torch.rand(tokens, ring.shape.num_experts, generator=generator, device="cpu")
    ids = scores.topk(top_k, dim=1).indices.to(torch.int32)
    weights = torch.full((tokens, top_k), 1.0 / top_k, dtype=torch.float32, device="cpu")
    return ExpertCall(x.to(ring.device), ids.to(ring.device), weights.to(ring.device), [], None)


def _best(run: Callable[[ExpertCall], object], call: ExpertCall, device: torch.device) -> float:
    """Seconds of the fastest of `RUNS` runs, after one that allocates."""
    times = []
    for _ in range(RUNS + 1):
        _wait(device)
        started = time.perf_counter()
        run(call)
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if not devices.is_host(device):
        devices.recorded(device=device).synchronize()
