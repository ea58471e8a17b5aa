"""Connections that ask nothing, and clients that do not read their answers, beside clients that do."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from system.conftest import Served

IDLE = 10_000
SLOW = 8
SECONDS = 60.0


@pytest.fixture
def descriptors() -> Iterator[int]:
    """How many connections this process may have, after it has asked for as many as it may get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, max(soft, IDLE + 1000)) if hard != resource.RLIM_INFINITY else max(soft, IDLE + 1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield wanted - 500
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def greedy(served: Served) -> list[int]:
    sampling = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0}
    tokens: list[int] = served.api.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling})[
        "output_ids"
    ]
    return tokens


def in_flight(served: Served) -> int:
    return int(served.api.get("/kt/status")["requests_in_flight"])


def stream_request() -> bytes:
    sampling = {"max_new_tokens": 2000, "ignore_eos": True}
    body = json.dumps({"input_ids": [5, 6, 7], "stream": True, "sampling_params": sampling}).encode()
    head = "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def until_in_flight(served: Served, is_reached: Callable[[int], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_reached(in_flight(served)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_thousands_of_idle_connections_and_a_slow_reader_cost_nobody_an_answer(
    float32_servers: Callable[[str], Served], descriptors: int
) -> None:
    served = float32_servers("tiny-qwen3-moe")
    expected = greedy(served)
    where = urlsplit(served.api.url)
    address = (where.hostname or "", where.port or 0)
    with contextlib.ExitStack() as open_connections:
        for _ in range(min(IDLE, descriptors)):
            open_connections.enter_context(socket.create_connection(address, timeout=SECONDS))
        assert greedy(served) == expected
        for _ in range(SLOW):
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(address)
            open_connections.enter_context(slow)
            slow.sendall(stream_request())
        until_in_flight(served, lambda number: number > 0)
        assert greedy(served) == expected
    until_in_flight(served, lambda number: number == 0)
    assert greedy(served) == expected
