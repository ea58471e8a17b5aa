"""Many requests leave no memory, file or thread behind. SOAK_REQUESTS: how many (`make soak`: 100,000).

What counts is anonymous memory. Of files a process holds the pages that it has used lately, and the system takes them
away as it likes. A page that a fork shares with its parent (`sglang_patch/frontend/processes.py`) is counted for both,
before the fork writes to it and after.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import httpx
import numpy as np
import pytest
from reference.server import changed_processes
from reference.server.anonymous_memory import anonymous_bytes
from system import forked_server
from system.conftest import Served

from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "1000"))
WARM_UP = 100  # the prefix cache is full then; caches of the allocator and of Python fill
AT_ONCE = 16
TOKENS = 12
# Since the warm-up. In 1,000 requests anonymous memory of all processes together grew by 0.25 MB, and malloc's by
# 0.26 MB; in 100,000 by 0.60 and 0.40. For each of LEAKED requests LEAK_BYTES stay.
GROWTH_BYTES, ALLOCATED_BYTES = 2 << 20, 2 << 20
LEAKED = 80
SETTLING_SECONDS = 60.0
# SGLang asks every few seconds whether the client of a waiting request is gone: until then the frontend holds the
# request, 25 KB each. For a thousand requests that does not matter.
NOTICED_SECONDS = 10.0 if REQUESTS > 1000 else 0.0


def parts(requests: int) -> list[int]:
    """After each of them the use is printed."""
    first = min(requests, 2000)
    rest = requests - first
    return [first, *(min(10_000, rest - begun) for begun in range(0, rest, 10_000))]


PARTS = parts(REQUESTS)


@dataclass(frozen=True)
class Use:
    """Of all processes of a server. `open_files`: descriptors, `sockets` among them. `allocated_bytes`: from malloc, by
    the scheduler and the frontend."""

    anonymous_bytes: int
    resident_bytes: int
    allocated_bytes: int
    open_files: int
    sockets: int
    threads: int

    def grown_from(self, before: Use) -> dict[str, int]:
        return {one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(Use)}


def use_of(served: Served) -> Use:
    """With an empty prefix cache."""
    flush_cache(served)
    frontend = forked_server.frontend_of(served.model_directory)
    processes = [frontend, *frontend.children(recursive=True)]
    anonymous = sum(anonymous_bytes(process.pid) for process in processes)
    resident = sum(process.memory_info().rss for process in processes)
    files, threads = sum(one.num_fds() for one in processes), sum(one.num_threads() for one in processes)
    sockets = sum(is_socket(Path(f"/proc/{one.pid}/fd/{name}")) for one in processes for name in fds(one.pid))
    allocated = changed_processes.counted_memory(served.model_directory.parent, functools.partial(wait, served))
    return Use(anonymous, resident, sum(allocated.values()), files, sockets, threads)


def fds(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/fd")


def is_socket(descriptor: Path) -> bool:
    try:
        return os.readlink(descriptor).startswith("socket:")
    except FileNotFoundError:  # closed meanwhile
        return False


def wait(served: Served, condition: Callable[[], bool]) -> None:
    """A scheduler without requests would sleep."""
    deadline = time.monotonic() + SETTLING_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        flush_cache(served)
        time.sleep(0.1)


def flush_cache(served: Served) -> None:
    """Once no request runs: the server refuses it before."""
    flushed = httpx.post(f"{served.api.url}/flush_cache", params={"timeout": 30}, timeout=60, trust_env=False)
    assert flushed.status_code == 200, flushed.text


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
    """The use once the server has closed the last connections, and noticed which clients are gone."""
    time.sleep(NOTICED_SECONDS)
    deadline = time.monotonic() + SETTLING_SECONDS
    while (use := use_of(served)).open_files > files and time.monotonic() < deadline:
        time.sleep(0.5)
    return use


def leaks(directory: Path) -> Path:
    return directory / "leaks"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server of its own, which says what it has allocated, and leaks when it is told to."""
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    monkeypatch.setenv(changed_processes.COUNTED_MEMORY, str(tmp_path))
    monkeypatch.setenv(changed_processes.LEAK, str(leaks(tmp_path)))
    leaks(tmp_path).mkdir()
    options = ["--dtype", "float32", "--max-total-tokens", "1280", "--routing-replay", "16MiB"]
    options += ["--adapter-dir", str(tmp_path / "adapters"), "--", "--chunked-prefill-size", "64", "--page-size", "8"]
    with server(str(tmp_path / "model"), options, tmp_path / "server.log") as api:
        yield Served(api, "tiny-qwen3-moe", tmp_path / "model", tmp_path / "server.log")


def megabytes(grown: dict[str, int]) -> str:
    return ", ".join(
        f"{name.removesuffix('_bytes')} {value / 1e6:+.2f} MB" if name.endswith("_bytes") else f"{name} {value:+d}"
        for name, value in grown.items()
    )


def check_growth(before: Use, after: Use) -> None:
    grown = after.grown_from(before)
    assert grown["anonymous_bytes"] <= GROWTH_BYTES, f"memory grew: {megabytes(grown)}"
    assert grown["allocated_bytes"] <= ALLOCATED_BYTES, f"memory of malloc grew: {megabytes(grown)}"
    assert all(grown[name] <= 0 for name in ("open_files", "sockets", "threads")), megabytes(grown)


@pytest.mark.timeout(600 + REQUESTS // 5)
def test_many_requests_leave_nothing_behind_and_a_leak_would_be_noticed(served: Served) -> None:
    idle = use_of(served)
    attack(served, WARM_UP, 0)
    sent, before = 0, settled(served, idle.open_files)
    for part, size in enumerate(PARTS, start=1):
        attack(served, size, part)
        sent, after = sent + size, settled(served, before.open_files)
        print(f"{WARM_UP + sent} requests: since {WARM_UP}: {megabytes(after.grown_from(before))}", flush=True)
    check_growth(before, after)
    for process in changed_processes.COUNTED:
        before = after
        (leaks(served.model_directory.parent) / process).touch()
        attack(served, LEAKED, len(PARTS) + 1)
        (leaks(served.model_directory.parent) / process).unlink()
        after = settled(served, before.open_files)
        print(f"{LEAKED} requests that leak in the {process}: {megabytes(after.grown_from(before))}", flush=True)
        with pytest.raises(AssertionError, match="memory grew"):
            check_growth(before, after)
