"""Greedy streams of the base model that other users read while something else happens on the server."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx

NEW_TOKENS = 24


@dataclass
class Streams:
    """`answers`: the tokens of each finished stream, by prompt. `failures`: of streams that ended otherwise."""

    expected: dict[tuple[int, ...], list[int]]
    answers: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def changed(self) -> list[tuple[tuple[int, ...], list[int]]]:
        return [(prompt, tokens) for prompt, tokens in self.answers if tokens != self.expected[prompt]]


def client_of(url: str) -> httpx.Client:
    """One for many requests: to make one reads all certificates, which takes longer than a short answer."""
    return httpx.Client(base_url=url, timeout=300, trust_env=False)


def read_stream(client: httpx.Client, prompt: Sequence[int]) -> list[int]:
    """The tokens of one answer, as they are after the last event."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "stream": True,
    }
    tokens: list[int] = []
    with client.stream("POST", "/generate", json=body) as answer:
        answer.raise_for_status()
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise RuntimeError(f"a stream ended without [DONE]: {events[-1:]}")
    for event in events[:-1]:
        found = json.loads(event)
        if "error" in found:
            raise RuntimeError(str(found["error"]))
        tokens = found["output_ids"]
    return tokens


@contextlib.contextmanager
def reading_streams(url: str, prompts: Sequence[Sequence[int]]) -> Iterator[Streams]:
    """One reader for each prompt, which asks again and again. What is expected is read before, alone."""
    with client_of(url) as client:
        streams = Streams({tuple(prompt): read_stream(client, prompt) for prompt in prompts})
    assert all(len(tokens) == NEW_TOKENS for tokens in streams.expected.values())
    ending = threading.Event()

    def read(prompt: tuple[int, ...]) -> None:
        with client_of(url) as client:
            while not ending.is_set():
                try:
                    streams.answers.append((prompt, read_stream(client, prompt)))
                except (httpx.HTTPError, RuntimeError, ValueError) as error:
                    streams.failures.append(f"{type(error).__name__}: {error}")

    readers = [threading.Thread(target=read, args=(prompt,)) for prompt in streams.expected]
    for reader in readers:
        reader.start()
    try:
        yield streams
    finally:
        ending.set()
        for reader in readers:
            reader.join()
