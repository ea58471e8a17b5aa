"""Many requests leave no memory, file or thread behind. SOAK_REQUESTS: how many (`make soak`: 100,000).

The server's processes are forks (`sglang_patch/frontend/processes.py`). A page that a process has from its parent
becomes its own when it writes to it, as every use of a Python object does. So the memory that a process shares with no
other (USS) grows for a while, by 0.3 KB a request after some thousands, while the C library has 16 bytes more in use
for each. Here the resident sets count, less what was kept of routes: their ring is bounded.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import numpy as np
import pytest
from system import forked_server
from system.conftest import Served

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "1000"))
WARM_UP = 400  # caches of the allocator and of Python fill, and bounded records
AT_ONCE = 16
TOKENS = 12
GROWTH_BYTES = 8 << 20  # of all processes together, beside the kept routes
SETTLING_SECONDS = 30.0


@dataclass(frozen=True)
class Use:
    """Of all processes of a server. `route_bytes`: part of the memory. `open_files`: descriptors, sockets too."""

    resident_bytes: int
    route_bytes: int
    open_files: int
    threads: int


def use_of(served: Served) -> Use:
    """With an empty prefix cache."""
    assert httpx.post(f"{served.api.url}/flush_cache", timeout=60, trust_env=False).status_code == 200
    frontend = forked_server.frontend_of(served.model_directory)
    processes = [frontend, *frontend.children(recursive=True)]
    memory = sum(process.memory_info().rss for process in processes)
    files, threads = sum(one.num_fds() for one in processes), sum(one.num_threads() for one in processes)
    return Use(memory, route_bytes(served), files, threads)


def route_bytes(served: Served) -> int:
    routes = served.api.get("/kt/status")["kept_routes"]
    return 0 if routes is None else routes["tokens"] * routes["size_bytes"] // routes["capacity_tokens"]


async def ask(client: httpx.AsyncClient, prompt: list[int], number: int) -> None:
    """A plain answer, a stream, a client that goes away, or a refused request."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    if number % 8 == 0:
        async with client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
            assert [line async for line in answer.aiter_lines() if line][-1] == "data: [DONE]"
    elif number % 8 == 1:
        async with client.stream("POST", "/generate", json={**body, "stream": True}):
            return
    elif number % 8 == 2:
        refused = await client.post("/generate", json={**body, "sampling_params": {"temperature": -1}})
        assert refused.status_code == 400, refused.text
    else:
        answered = await client.post("/generate", json=body)
        assert answered.status_code == 200, answered.text


async def ask_all(url: str, prompts: list[list[int]]) -> None:
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
        for first in range(0, len(prompts), 8 * AT_ONCE):
            some = prompts[first : first + 8 * AT_ONCE]
            await asyncio.gather(*(ask(client, prompt, number) for number, prompt in enumerate(some)))


def attack(served: Served, count: int, seed: int) -> None:
    prompts = np.random.default_rng(seed).integers(3, 700, (count, TOKENS)).tolist()
    asyncio.run(ask_all(served.api.url, prompts))


def settled(served: Served, files: int) -> Use:
    """The use once the server has closed the last connections."""
    deadline = time.monotonic() + SETTLING_SECONDS
    while (use := use_of(served)).open_files > files and time.monotonic() < deadline:
        time.sleep(0.5)
    return use


@pytest.mark.timeout(600 + REQUESTS // 5)
def test_many_requests_leave_nothing_behind(float32_servers: Callable[[str], Served]) -> None:
    served = float32_servers("tiny-qwen3-moe")
    idle = use_of(served)
    attack(served, WARM_UP, 0)
    before = settled(served, idle.open_files)
    for part, first in enumerate(range(0, REQUESTS, 10_000), start=1):
        attack(served, min(10_000, REQUESTS - first), part)
    after = settled(served, before.open_files)
    grown = after.resident_bytes - before.resident_bytes - (after.route_bytes - before.route_bytes)
    print(f"{REQUESTS} requests after {WARM_UP}: {grown / 2**20:.1f} MiB, {before} -> {after}")
    assert grown <= GROWTH_BYTES
    assert after.open_files <= before.open_files and after.threads <= before.threads
