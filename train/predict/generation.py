"""Answers to many prompts from a running server's `/generate`, several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kt_runtime.train.serving_path import PAUSES_SECONDS, Answer, Ask, ServingPath, malformed


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
