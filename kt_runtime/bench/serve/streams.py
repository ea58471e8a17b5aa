"""Concurrent streaming requests to /generate, and the rate at which all of them together decode."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from kt_runtime.errors import RequestTimeoutError, RuntimeFault, ServerUnreachableError

COMPLETION = re.compile(r'"completion_tokens":\s*(\d+)')
DATA, DONE = "data: ", "[DONE]"


@dataclass
class Stream:
    """`events`: (seconds on the performance counter, tokens of the answer so far). `answer`: the answer's tokens."""

    events: list[tuple[float, int]] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)


def decode(
    url: str, prompts: Sequence[list[int]], new_tokens: int, adapters: Sequence[str | None], timeout_s: float
) -> list[Stream]:
    """Sends one greedy request for each prompt, all at once, each with its own adapter (None: the base).

    Raises RuntimeFault for an answer that is an error or not of `new_tokens`, ServerUnreachableError for a server that
    ends, RequestTimeoutError for one that is silent for `timeout_s`.
    """
    try:
        return asyncio.run(_decode(url, prompts, new_tokens, adapters, timeout_s))
    except httpx.TimeoutException:
        raise RequestTimeoutError(f"{url}/generate: no answer in {timeout_s:.0f} s") from None
    except httpx.TransportError as error:
        raise ServerUnreachableError(f"{url}/generate: {error or type(error).__name__}") from None


async def _decode(
    url: str, prompts: Sequence[list[int]], new_tokens: int, adapters: Sequence[str | None], timeout_s: float
) -> list[Stream]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits, trust_env=False) as client:
        pairs = zip(prompts, adapters, strict=True)
        streams = await asyncio.gather(*(stream_one(client, prompt, new_tokens, adapter) for prompt, adapter in pairs))
    for stream in streams:
        if len(stream.answer) != new_tokens:
            raise RuntimeFault(f"/generate: an answer has {len(stream.answer)} tokens, {new_tokens} were asked for")
    return streams


async def stream_one(
    client: httpx.AsyncClient, prompt: list[int], new_tokens: int, adapter: str | None, into: Stream | None = None
) -> Stream:
    """One greedy request. `into`: gets the events as they come. Raises RuntimeFault for an answer that is an error."""
    body = generate_body(prompt, new_tokens) | {"stream": True}
    if adapter is not None:
        body["lora_path"] = adapter
    stream, last = into or Stream(), ""
    async with client.stream("POST", "/generate", json=body) as answer:
        if not answer.is_success:
            text = (await answer.aread()).decode(errors="replace")
            raise RuntimeFault(f"/generate: HTTP {answer.status_code}: {text[:300]}")
        async for line in answer.aiter_lines():
            if not line.startswith(DATA) or line.endswith(DONE):
                continue
            counted = COMPLETION.search(line)  # parsing the whole event would take the server's processor time
            if counted is None:
                raise RuntimeFault(f"/generate: {line[:300]}")
            stream.events.append((time.perf_counter(), int(counted[1])))
            last = line
    if last:
        stream.answer = [int(token) for token in json.loads(last.removeprefix(DATA))["output_ids"]]
    return stream


def generate_body(prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """A greedy request that ends after exactly `new_tokens`."""
    sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


def tokens_per_s(streams: Sequence[Stream]) -> float | None:
    """The rate while all streams decode: from the last one's first token to the first one's last token.

    The sum of the streams' rates, each between its own events in that time, so that no step is counted in part. None if
    a stream has fewer than two events then, as happens where a busy machine gives this process no time.
    """
    start = max(stream.events[0][0] for stream in streams)
    end = min(stream.events[-1][0] for stream in streams)
    common = [[event for event in stream.events if start <= event[0] <= end] for stream in streams]
    return sum(map(_rate, common)) if min(map(len, common)) > 1 else None


def _rate(events: list[tuple[float, int]]) -> float:
    (first, before), (last, after) = events[0], events[-1]
    return (after - before) / (last - first)
