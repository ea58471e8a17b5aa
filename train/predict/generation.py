"""Answers to many prompts from a running server's `/generate`, several at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kt_runtime.train.predict.serving_path import PAUSES_SECONDS, Answer, Ask, ServingPath, malformed

PROGRESS_SECONDS = 5.0


@dataclass(frozen=True)
class Prompt:
    """`ids` include the generation prompt. `where`: the row's place, for messages."""

    ids: Iterable[int]
    max_new_tokens: int
    where: str


@dataclass
class CacheUse:
    """Sums over all requests so far: prompt tokens sent, and how many of them were in the server's prefix cache."""

    sent_tokens: int = 0
    cached_tokens: int = 0

    def add(self, answer: Answer) -> None:
        self.sent_tokens += int(answer["meta_info"].get("prompt_tokens") or 0)
        self.cached_tokens += int(answer["meta_info"].get("cached_tokens") or 0)

    def __str__(self) -> str:
        return f"{self.sent_tokens:,} prompt tokens sent, {self.cached_tokens:,} of them from the server's prefix cache"


@dataclass(frozen=True)
class Generator:
    """`adapter`: a name that the server serves, or None for the base. `sampling`: SGLang's parameters for all prompts.

    `num_at_once`: requests in flight.
    """

    url: str
    api_key: str | None
    adapter: str | None
    sampling: dict[str, Any]
    num_at_once: int
    pauses_s: tuple[float, ...] = PAUSES_SECONDS

    def answer(self, prompts: Sequence[Prompt], answered: Callable[[int, str], None]) -> CacheUse:
        """Calls `answered(index, text)` for each prompt, in the order of the replies. Raises as ServingPath."""
        use = CacheUse()
        waiting = iter(enumerate(prompts))

        async def work(ask: Ask) -> None:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(self.num_at_once, len(prompts))):
                    workers.create_task(self._work(ask, waiting, answered, use))

        ServingPath(self.url, self.api_key, self.adapter, self.num_at_once, self.pauses_s).run(work)
        return use

    async def _work(
        self,
        ask: Ask,
        waiting: Iterator[tuple[int, Prompt]],
        answered: Callable[[int, str], None],
        use: CacheUse,
    ) -> None:
        for index, prompt in waiting:
            body = {
                "input_ids": [int(token) for token in prompt.ids],
                "sampling_params": {**self.sampling, "max_new_tokens": prompt.max_new_tokens},
            }
            answer = await ask(body, prompt.where)
            if "text" not in answer:
                raise malformed(prompt.where, answer)
            use.add(answer)
            answered(index, str(answer["text"]))


class Progress:
    """Reports every few seconds how many of `total` are done, the rate, and the time left."""

    def __init__(
        self,
        total: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        verb: str = "answered",
        unit: str = "rows",
    ) -> None:
        self._total, self._say, self._clock, self._verb, self._unit = total, say, clock, verb, unit
        self.started = self._said = clock()
        self.done = 0

    def add(self) -> None:
        self.done += 1
        now = self._clock()
        if self.done == self._total or now - self._said >= PROGRESS_SECONDS:
            self._said = now
            rate = self.done / max(now - self.started, 1e-9)
            left = timedelta(seconds=round((self._total - self.done) / rate))
            self._say(f"{self._verb} {self.done}/{self._total}  {rate:.2f} {self._unit}/s  left {left}")

    @property
    def seconds(self) -> float:
        return self._clock() - self.started
