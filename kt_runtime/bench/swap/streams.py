"""Streams that decode on a thread while something else is measured, and the gaps between their tokens.

And threads that notice when the machine stops.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import TracebackType

import httpx

from kt_runtime.bench.serve.streams import Stream, stream_one
from kt_runtime.errors import KtError, RuntimeFault

FIRST_TOKEN = 3  # smaller ids are special tokens of a made model
PROMPT_TOKENS = 4
PATIENCE_SECONDS = 120.0
FIRST_EVENTS = 4
"""Events that every stream must have had before anything is measured."""
NAP_SECONDS = 0.005
LEAST_STOP_SECONDS = 0.02
"""On a busy processor a thread that only sleeps wakes up to 8 ms late: later, the processor was stopped."""


class Streams:
    """`count` greedy requests of `new_tokens`; a stream that ends begins again with another prompt.

    `adapter`: the name that they use, None: the base. In the block all of them decode. `failures`: requests that were
    refused, broke off or had too few tokens. The streams that run at the end of the block are cancelled.
    """

    def __init__(self, url: str, count: int, new_tokens: int, vocabulary: int, adapter: str | None = None) -> None:
        self._url, self._count, self._new_tokens = url, count, new_tokens
        self._vocabulary, self._adapter = vocabulary, adapter
        self._requests: list[Stream] = []
        self.failures: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()), daemon=True)

    def __enter__(self) -> Streams:
        self._thread.start()
        while sum(len(each.events) >= FIRST_EVENTS for each in list(self._requests)) < self._count:
            self._thread.join(0.01)
            if self.failures or not self._thread.is_alive():
                self.__exit__(None, None, None)
                raise RuntimeFault(f"a stream failed before anything was measured: {self.failures[:1]}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def gaps(self, since: float, until: float) -> list[tuple[float, float]]:
        """Begin and end of gaps between two tokens of a stream that overlap the time (performance counter)."""
        return [(a, b) for a, b in self._gaps() if b >= since and a <= until]

    def gaps_ms(self, since: float, until: float) -> list[float]:
        """The lengths of `gaps`."""
        return [1e3 * (b - a) for a, b in self.gaps(since, until)]

    def ended_gaps_ms(self, since: float, until: float) -> list[float]:
        """As `gaps_ms`, for gaps that end in the time, so that no gap belongs to two times."""
        return [1e3 * (b - a) for a, b in self._gaps() if since < b <= until]

    def _gaps(self) -> Iterator[tuple[float, float]]:
        for request in list(self._requests):
            yield from pairwise([at for at, _ in list(request.events)])

    def wait_for_gaps_ms(self, since: float, count: int) -> list[float]:
        """The gaps from `since` on, as soon as there are `count` of them. Raises RuntimeFault if there are none in
        `PATIENCE_SECONDS`."""
        ends = now() + PATIENCE_SECONDS
        while len(gaps := self.gaps_ms(since, now())) < count and now() < ends:
            time.sleep(0.01)
        if not gaps:
            raise RuntimeFault(f"no stream got a token in {PATIENCE_SECONDS:.0f} s; failures: {self.failures[:1]}")
        return gaps

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=600.0, limits=limits, trust_env=False) as client:
            tasks = [asyncio.create_task(self._repeat(client, number)) for number in range(self._count)]
            await self._stop.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _repeat(self, client: httpx.AsyncClient, number: int) -> None:
        for request in range(1 << 30):
            begin = FIRST_TOKEN + (31 * number + 7 * request) % (self._vocabulary - FIRST_TOKEN - PROMPT_TOKENS)
            stream = Stream()
            self._requests.append(stream)
            try:
                prompt = list(range(begin, begin + PROMPT_TOKENS))
                await stream_one(client, prompt, self._new_tokens, self._adapter, stream)
                if not stream.events or stream.events[-1][1] != self._new_tokens:
                    raise RuntimeFault(f"an answer has {len(stream.answer)} of {self._new_tokens} tokens")
            except (KtError, httpx.HTTPError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)


class Naps:
    """A thread on each processor that sleeps `NAP_SECONDS` again and again, in the block. How late one wakes says for
    how long its processor started no waiting thread: a virtual machine, or one processor of it, is sometimes stopped
    for 0.02 to 0.5 s, which its system does not count as stolen time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._woke: dict[int, list[tuple[float, float]]] = {}  # by processor: when, and how many seconds too late
        self._stops: dict[int, list[tuple[float, float]]] = {}  # by processor: from, until
        self._ends = threading.Event()
        processors = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in processors]

    def __enter__(self) -> Naps:
        for each in self._threads:
            each.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        for each in self._threads:
            each.join()

    def latest_ms(self, since: float, until: float) -> float:
        """How late a thread woke at most, of naps that overlap the time."""
        naps = (nap for woke in list(self._woke.values()) for nap in list(woke))
        return max((1e3 * late for woke, late in naps if woke >= since and woke - late <= until), default=0.0)

    def stopped_ms(self, since: float, until: float) -> float:
        """How long a processor was stopped meanwhile, the one with the most; stops from `LEAST_STOP_SECONDS` on."""
        return 1e3 * max((_common(list(stops), since, until) for stops in list(self._stops.values())), default=0.0)

    def _run(self, processor: int) -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {processor})  # of this thread
        fell_asleep = self._clock()
        while not self._ends.wait(NAP_SECONDS):
            woke = self._clock()
            self._note(processor, woke, woke - fell_asleep - NAP_SECONDS)
            fell_asleep = woke

    def _note(self, processor: int, woke: float, late: float) -> None:
        self._woke.setdefault(processor, []).append((woke, late))
        if late >= LEAST_STOP_SECONDS:  # few: `stopped_ms` is asked for each of many thousand gaps
            self._stops.setdefault(processor, []).append((woke - late, woke))


def _common(stops: Sequence[tuple[float, float]], since: float, until: float) -> float:
    return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in stops)


def now() -> float:
    return time.perf_counter()
