"""Many requests to a running server's `/generate`, several at a time.

A request that fails for a temporary reason (no connection, busy, restarting) is retried. Any other failure ends the
whole run; answers received before have been handed over by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import httpx

from kt_runtime.errors import InvalidValueError, RequestTimeoutError, RuntimeFault, ServerUnreachableError

PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)  # before each retry
PASSING_STATUS = {429, 502, 503, 504}
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 3600.0
PROGRESS_SECONDS = 5.0

Answer = Mapping[str, Any]
Ask = Callable[[dict[str, Any], str], Coroutine[Any, Any, Any]]
"""`ask(body, where)` returns SGLang's `Answer`, with `meta_info`; a list of them for a body with several prompts.
`where`: the row's place, for messages."""


@dataclass(frozen=True)
class ServingPath:
    """`adapter`: a name that the server serves, or None for the base. `num_at_once`: most requests in flight."""

    url: str
    api_key: str | None = field(repr=False)
    adapter: str | None
    num_at_once: int
    pauses_s: tuple[float, ...] = PAUSES_SECONDS

    def run(self, work: Callable[[Ask], Awaitable[None]]) -> None:
        """Runs `work` to its end. `work` may send any number of requests at once; those above `num_at_once` wait.

        Raises ServerUnreachableError, RequestTimeoutError, RuntimeFault, and InvalidValueError for a refused request.
        Ctrl-C raises KeyboardInterrupt; closing their connections makes the server cancel the requests in flight.
        """
        try:
            asyncio.run(self._run(work))
        except BaseExceptionGroup as group:
            raise _first(group) from None

    async def _run(self, work: Callable[[Ask], Awaitable[None]]) -> None:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=self.num_at_once)
        turns = asyncio.Semaphore(self.num_at_once)
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=timeout, limits=limits, trust_env=False
        ) as http:

            async def ask(body: dict[str, Any], where: str) -> Any:
                async with turns:
                    return await self._ask(http, body, where)

            await work(ask)

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, Any], where: str) -> Any:
        if self.adapter is not None:
            body = {**body, "lora_path": self.adapter}
        for pause_s in (*self.pauses_s, None):
            try:
                answer = await http.post("/generate", json=body)
            except httpx.ReadTimeout:
                raise RequestTimeoutError(f"{where}: {self.url} gave no answer in {ANSWER_SECONDS:g} s") from None
            except httpx.TransportError as error:
                failure = f"{type(error).__name__} {error}".strip()
            else:
                if answer.status_code not in PASSING_STATUS:
                    return _checked(answer, where)
                failure = f"HTTP {answer.status_code}"
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        raise ServerUnreachableError(f"{where}: {self.url} did not answer in {len(self.pauses_s) + 1} tries: {failure}")


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


def malformed(where: str, answer: Any) -> RuntimeFault:
    return RuntimeFault(f"{where}: the server's answer is not SGLang's: {str(answer)[:200]}")


def _checked(answer: httpx.Response, where: str) -> Answer | list[Answer]:
    if not answer.is_success:
        message = f"{where}: the server answers HTTP {answer.status_code}: {_message(answer)}"
        raise InvalidValueError(message) if answer.is_client_error else RuntimeFault(message)
    try:
        value: Answer | list[Answer] = answer.json()
        reasons = [each["meta_info"]["finish_reason"] or {} for each in (value if isinstance(value, list) else [value])]
        ended = (reason.get("message", "aborted") for reason in reasons if reason.get("type") == "abort")
        aborted = next(ended, None)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise malformed(where, answer.text) from None
    if aborted is not None:
        raise RuntimeFault(f"{where}: the server ended the request: {aborted}")
    return value


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:300]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
