"""Clients for the demo: continuous streams, a probe for a new version's first token, and the times of both."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

REQUEST_SECONDS = 60.0
STEP = re.compile(r"step (\d+)/\d+.*?loss ([\d.]+)")
MILLISECOND_DIGITS = 3


def chat_stream(http: httpx.Client, model: str, question: str, max_tokens: int = 32) -> Iterator[str]:
    """Yields the answer piece by piece from /v1/chat/completions. Raises httpx errors and RuntimeError."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    finished = False
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            for choice in event["choices"]:
                finished = finished or choice["finish_reason"] is not None
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]
    if not finished:
        raise RuntimeError("the stream ended without a finish reason")


def chat(http: httpx.Client, model: str, question: str) -> str:
    return "".join(chat_stream(http, model, question))


@dataclass(frozen=True)
class Answered:
    """One stream: `client` counts from 0, times are Unix times in seconds."""

    client: int
    began_at: float
    ended_at: float
    by_adapter: bool


@dataclass
class Streams:
    """`number` clients that stream answers to one question after the other, from `begin` until the block's end.

    `adapter` may be set while the clients run; every other client then uses it. `_lock` guards the counters and lists.
    """

    url: str
    model: str
    questions: list[str]
    number: int
    adapter: str | None = None
    total: int = 0
    failed: int = 0
    longest_wait_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    answered: list[Answered] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(index,), daemon=True) for index in range(self.number)]

    def __enter__(self) -> Streams:
        return self

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(REQUEST_SECONDS)

    def _ask(self, index: int) -> None:
        count = index
        with httpx.Client(base_url=self.url, timeout=REQUEST_SECONDS, trust_env=False) as http:
            while not self._stop.is_set():
                by_adapter = bool(self.adapter and index % 2)
                model = f"{self.model}:{self.adapter}" if by_adapter else self.model
                began_at = time.time()
                if self._stream(http, model, self.questions[count % len(self.questions)]):
                    with self._lock:
                        self.answered.append(Answered(index, began_at, time.time(), by_adapter))
                count += self.number

    def _stream(self, http: httpx.Client, model: str, question: str) -> bool:
        """Whether the stream was answered completely."""
        before, longest, failure = time.monotonic(), 0.0, None
        try:
            for _ in chat_stream(http, model, question):
                now = time.monotonic()
                before, longest = now, max(longest, now - before)
        except (httpx.HTTPError, RuntimeError, ValueError) as error:
            failure = f"{model}: {question!r}: {type(error).__name__}: {error}"
        with self._lock:
            self.total += 1
            self.longest_wait_s = max(self.longest_wait_s, longest)
            if failure:
                self.failed += 1
                self.failures.append(failure)
        return failure is None


class FirstToken:
    """Retries requests to an adapter, from `begin` until it answers. `at`: the Unix time of its first token."""

    def __init__(self, url: str, model: str, adapter: str, question: str, pause_s: float = 0.02) -> None:
        self._url, self._model, self._question, self._pause_s = url, f"{model}:{adapter}", question, pause_s
        self.at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._probe, daemon=True)

    def __enter__(self) -> FirstToken:
        return self

    def begin(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(REQUEST_SECONDS)

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _probe(self) -> None:
        with httpx.Client(base_url=self._url, timeout=REQUEST_SECONDS, trust_env=False) as http:
            while not self._stop.is_set():
                try:
                    for _ in chat_stream(http, self._model, self._question, max_tokens=1):
                        self.at = time.time()
                        return
                except (httpx.HTTPError, RuntimeError, ValueError):
                    time.sleep(self._pause_s)  # not published yet


def timeline_of(
    answered: Sequence[Answered],
    lines: Sequence[tuple[float, str]],
    optim_finished_at: float,
    first_token_at: float,
    figures: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON of `kt-runtime demo --timeline`, which README's picture is drawn from: times in seconds since the first
    stream began; a row of `streams` is [client, began, ended, by the adapter].

    `lines`: of `kt-runtime train`, with Unix times; `steps` are those that report a step: [time, step, loss].
    """
    begin = min((stream.began_at for stream in answered), default=first_token_at)

    def since(moment: float) -> float:
        return round(moment - begin, MILLISECOND_DIGITS)

    steps = [(moment, STEP.search(line)) for moment, line in lines]
    return {
        "model": figures["model"],
        "before": figures["before"],
        "after": figures["after"],
        "optim_finished_s": since(optim_finished_at),
        "first_token_s": since(first_token_at),
        "steps": [[since(moment), int(found[1]), float(found[2])] for moment, found in steps if found],
        "streams": [
            [stream.client, since(stream.began_at), since(stream.ended_at), stream.by_adapter]
            for stream in sorted(answered, key=lambda stream: stream.began_at)
        ],
    }
