"""An open-loop load: every request is sent at its time, whether earlier ones have been answered or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import httpx

from kt_runtime.bench.interfere.figures import Answered
from kt_runtime.bench.interfere.plan import Request
from kt_runtime.bench.serve.streams import stream_one
from kt_runtime.errors import RequestTimeoutError, RuntimeFault, ServerUnreachableError


def answers(url: str, requests: Sequence[Request], timeout_s: float) -> list[Answered]:
    """Sends the requests and waits for all answers. `sent` is the planned time: what a late client adds counts too.

    Raises RuntimeFault for an answer that is an error or too short, RequestTimeoutError, ServerUnreachableError.
    """
    try:
        return asyncio.run(_answers(url, requests, timeout_s))
    except httpx.TimeoutException:
        raise RequestTimeoutError(f"{url}/generate: no answer in {timeout_s:.0f} s") from None
    except httpx.TransportError as error:
        raise ServerUnreachableError(f"{url}/generate: {error or type(error).__name__}") from None


async def _answers(url: str, requests: Sequence[Request], timeout_s: float) -> list[Answered]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits, trust_env=False) as client:
        began = time.perf_counter()
        return await asyncio.gather(*(_answer(client, request, began + request.at_s) for request in requests))


async def _answer(client: httpx.AsyncClient, request: Request, at: float) -> Answered:
    await asyncio.sleep(max(0.0, at - time.perf_counter()))
    stream = await stream_one(client, request.prompt, request.new_tokens, None)
    if not stream.events or stream.events[-1][1] != request.new_tokens:
        raise RuntimeFault(f"/generate: an answer does not have the {request.new_tokens} tokens that were asked for")
    return Answered(at, stream.events)
