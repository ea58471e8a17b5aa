"""Answers to many prompts from a running server, several requests at a time, through SGLang's `/generate`.

A request that fails for a passing reason (no connection, busy, restarting) is sent again; any other failure ends the
whole, and what was answered until then has been handed over already.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx

from kt_runtime.errors import InvalidValueError, RequestTimeoutError, RuntimeFault, ServerUnreachableError

PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)  # before each further try
PASSING_STATUS = {429, 502, 503, 504}
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 3600.0
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True)
class Prompt:
    """`ids` with the generation prompt. `where`: the row's place, for messages."""

    ids: Iterable[int]
    max_new_tokens: int
    where: str


@dataclass(frozen=True)
class Generator:
    """`adapter`: a name that the server serves, or None for the base. `sampling`: SGLang's parameters for all prompts.

    `num_at_once`: requests under way at any time.
    """

    url: str
    api_key: str | None
    adapter: str | None
    sampling: dict[str, Any]
    num_at_once: int
    pauses_s: tuple[float, ...] = PAUSES_SECONDS

    def answer(self, prompts: Sequence[Prompt], answered: Callable[[int, str], None]) -> None:
        """Calls `answered(index, text)` for each prompt, in whatever order the answers come.

        Raises ServerUnreachableError, RequestTimeoutError, RuntimeFault, and InvalidValueError for a refused request.
        Ctrl-C raises KeyboardInterrupt; closing their connections makes the server drop the requests under way.
        """
        try:
            asyncio.run(self._answer_all(prompts, answered))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _answer_all(self, prompts: Sequence[Prompt], answered: Callable[[int, str], None]) -> None:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=self.num_at_once)
        waiting = iter(enumerate(prompts))
        async with (
            httpx.AsyncClient(
                base_url=self.url, headers=headers, timeout=timeout, limits=limits, trust_env=False
            ) as http,
            asyncio.TaskGroup() as workers,
        ):
            for _ in range(min(self.num_at_once, len(prompts))):
                workers.create_task(self._work(http, waiting, answered))

    async def _work(
        self, http: httpx.AsyncClient, waiting: Iterator[tuple[int, Prompt]], answered: Callable[[int, str], None]
    ) -> None:
        for index, prompt in waiting:
            answered(index, await self._ask(http, prompt))

    async def _ask(self, http: httpx.AsyncClient, prompt: Prompt) -> str:
        body: dict[str, Any] = {
            "input_ids": [int(token) for token in prompt.ids],
            "sampling_params": {**self.sampling, "max_new_tokens": prompt.max_new_tokens},
        }
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        for pause_s in (*self.pauses_s, None):
            try:
                answer = await http.post("/generate", json=body)
            except httpx.ReadTimeout:
                raise RequestTimeoutError(
                    f"{prompt.where}: {self.url} gave no answer in {ANSWER_SECONDS:g} s"
                ) from None
            except httpx.TransportError as error:
                failure = f"{type(error).__name__} {error}".strip()
            else:
                if answer.status_code not in PASSING_STATUS:
                    return _text(answer, prompt.where)
                failure = f"HTTP {answer.status_code}"
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        raise ServerUnreachableError(
            f"{prompt.where}: {self.url} did not answer in {len(self.pauses_s) + 1} tries: {failure}"
        )


def _text(answer: httpx.Response, where: str) -> str:
    if not answer.is_success:
        message = f"{where}: the server answers HTTP {answer.status_code}: {_message(answer)}"
        raise InvalidValueError(message) if answer.is_client_error else RuntimeFault(message)
    try:
        value = answer.json()
        text, reason = value["text"], value["meta_info"]["finish_reason"] or {}
    except (ValueError, KeyError, TypeError):
        raise RuntimeFault(f"{where}: the server's answer is not SGLang's: {answer.text[:200]}") from None
    if reason.get("type") == "abort":
        raise RuntimeFault(f"{where}: the server ended the request: {reason.get('message', 'aborted')}")
    return str(text)


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:300]


class Progress:
    """Says every few seconds how many of `total` rows are done, the rate, and the time left."""

    def __init__(self, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._say, self._clock = total, say, clock
        self.started = self._said = clock()
        self.done = 0

    def add(self) -> None:
        self.done += 1
        now = self._clock()
        if self.done == self._total or now - self._said >= PROGRESS_SECONDS:
            self._said = now
            rate = self.done / max(now - self.started, 1e-9)
            left = timedelta(seconds=round((self._total - self.done) / rate))
            self._say(f"answered {self.done}/{self._total}  {rate:.2f} rows/s  left {left}")

    @property
    def seconds(self) -> float:
        return self._clock() - self.started
