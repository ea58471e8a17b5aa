"""The parameters of `bench interfere`, and the load that they make: arrivals and lengths, from a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kt_runtime.bench.options import PRESET, check_dtype, check_number
from kt_runtime.errors import InvalidValueError
from kt_runtime.wire.settings import checked

HALF = 0.5
LOADS = (0.25, HALF, 0.75)
"""Loads, as shares of the server's rate of answers when requests always wait. `HALF` is always measured."""
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_RANGE = 64, 0.9, (4, 384)
ANSWER_MEDIAN, ANSWER_SIGMA, ANSWER_RANGE = 40, 0.6, (8, 128)
"""Lengths are log-normal as those of ShareGPT's conversations, and shorter: `exp(ln(median) + sigma * normal)`, cut off
at both ends. The answers to short prompts of a small model take long enough on two cores."""
FIRST_TOKEN = 3  # smaller ids are special tokens of a made model


@dataclass(frozen=True)
class Request:
    """`at_s`: seconds from the beginning of the load. `prompt`: token ids."""

    at_s: float
    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True)
class Plan:
    """`loads`: of the server's capacity; `seconds`: of arrivals at half load, at the other loads half as long.
    `warm_up_seconds`: of arrivals at half load before the first window. `alone_seconds`: of training without requests,
    in each of `alone_rounds` rounds with targets and without.

    A training step has `sequences` of `tokens`. `tpot_target_ms`, `ttft_target_ms`: None: `TPOT_FACTOR` and
    `TTFT_FACTOR` times the 99th percentile at half load without training.
    """

    model: str = PRESET
    layers: int | None = None
    loads: tuple[float, ...] = LOADS
    seconds: float = 40.0
    warm_up_seconds: float = 10.0
    alone_seconds: float = 12.0
    alone_rounds: int = 3
    burst: int = 24
    concurrency: int = 16
    sequences: int = 2
    tokens: int = 512
    rank: int = 8
    seed: int = 0
    tpot_target_ms: float | None = None
    ttft_target_ms: float | None = None
    train_share: float = 0.9
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidValueError and UnknownNameError."""
        for name in ("alone_rounds", "burst", "concurrency", "sequences", "rank"):
            check_number(name, getattr(self, name))
        check_number("tokens", self.tokens, 2, why="each token is to predict the next")
        check_number("seed", self.seed, 0)
        if self.layers is not None:
            check_number("layers", self.layers)
        for name, lowest in (("seconds", 2.0), ("warm_up_seconds", 1.0), ("alone_seconds", 1.0)):
            value = getattr(self, name)
            if not lowest <= value <= 3600:
                raise InvalidValueError(f"--{name.replace('_', '-')} is {value:g}; must be {lowest:g} to 3600")
        for load in self.loads:
            if not 0 < load <= 2:
                raise InvalidValueError(f"--load is {load:g}; must be above 0 and at most 2, of the server's capacity")
        for name in ("tpot_target_ms", "ttft_target_ms", "train_share"):
            checked(name, getattr(self, name), f"--{name.replace('_', '-')}")
        check_dtype(self.dtype)

    @property
    def all_loads(self) -> list[float]:
        """Half load first: it makes the targets."""
        return [HALF, *sorted({*self.loads} - {HALF})]

    def seconds_of(self, load: float) -> float:
        return self.seconds if load == HALF else self.seconds / 2

    @property
    def context_tokens(self) -> int:
        return max(PROMPT_RANGE[1] + ANSWER_RANGE[1] + 64, self.tokens + 64)

    def facts(self) -> dict[str, Any]:
        names = (
            "model",
            "layers",
            "seconds",
            "warm_up_seconds",
            "alone_seconds",
            "alone_rounds",
            "burst",
            "concurrency",
            "sequences",
            "tokens",
            "rank",
            "seed",
        )
        lengths = {
            "prompt": {"median": PROMPT_MEDIAN, "sigma": PROMPT_SIGMA, "range": list(PROMPT_RANGE)},
            "answer": {"median": ANSWER_MEDIAN, "sigma": ANSWER_SIGMA, "range": list(ANSWER_RANGE)},
        }
        return {name: getattr(self, name) for name in names} | {"train_share": self.train_share, "lengths": lengths}


def poisson(plan: Plan, rate_per_s: float, seconds: float, vocabulary: int, window: int = 0) -> list[Request]:
    """Requests that arrive independently of each other, and of the server's answers, for so many seconds. At least one.

    One seed gives the same lengths and arrivals in the same order at every rate: only the gaps scale. Every `window`
    has tokens of its own: prompts of an earlier one would be in the prefix cache.
    """
    chance, contents = np.random.default_rng(plan.seed), np.random.default_rng([plan.seed, window])
    requests: list[Request] = []
    at = 0.0
    while True:
        at += float(chance.exponential()) / rate_per_s
        if at > seconds and requests:
            return requests
        requests.append(_request(chance, contents, min(at, seconds), vocabulary))


def burst(plan: Plan, vocabulary: int) -> list[Request]:
    """Requests that all arrive at once."""
    chance = np.random.default_rng(plan.seed + 1)
    return [_request(chance, chance, 0.0, vocabulary) for _ in range(plan.burst)]


def _request(chance: np.random.Generator, contents: np.random.Generator, at_s: float, vocabulary: int) -> Request:
    prompt = _length(chance, PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_RANGE)
    answer = _length(chance, ANSWER_MEDIAN, ANSWER_SIGMA, ANSWER_RANGE)
    return Request(at_s, contents.integers(FIRST_TOKEN, vocabulary, prompt).tolist(), answer)


def _length(chance: np.random.Generator, median: int, sigma: float, allowed: tuple[int, int]) -> int:
    length = round(math.exp(math.log(median) + sigma * float(chance.normal())))
    return max(allowed[0], min(allowed[1], length))
