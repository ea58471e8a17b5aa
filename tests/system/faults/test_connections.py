"""Connections that ask nothing, and clients that do not read their answers, beside clients that do."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from system.conftest import Served

IDLE = 10_000
POLLS = 2000
SLOW = 8
SECONDS = 60.0
CLIENTS_KEEP_SECONDS = 5.0
"""A connection without a request: httpx, and so OpenAI's client."""


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


def request(path: str, content: dict[str, Any], *, close: bool = False) -> bytes:
    body = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += "Connection: close\r\n" if close else ""
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def stream_request() -> bytes:
    sampling = {"max_new_tokens": 2000, "ignore_eos": True}
    return request("/generate", {"input_ids": [5, 6, 7], "stream": True, "sampling_params": sampling})


def until_closed(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def until_in_flight(served: Served, is_reached: Callable[[int], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_reached(in_flight(served)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class WaitingCall:
    """A call of a Tinker client that waits for the one before it, which has not been sent. `future`: its id."""

    def __init__(self, served: Served) -> None:
        self._api = served.api
        self._session = self._post("create_session", tags=[], user_metadata=None, sdk_version="0")["session_id"]
        lora = {"rank": 4, "seed": 1, "train_unembed": False, "train_mlp": True, "train_attn": True}
        model = {"session_id": self._session, "model_seq_id": 0, "base_model": "model", "lora_config": lora}
        opened = self._post("create_model", **model)
        self._model = self._post("retrieve_future", request_id=opened["request_id"])["model_id"]
        self.future: str = self._step(2)

    def send_what_is_missing(self) -> None:
        self._step(1)

    def heartbeat(self) -> None:
        self._post("session_heartbeat", session_id=self._session)

    def finish(self) -> None:
        self._post(f"sessions/{self._session}/finish", reason={"type": "success"})

    def _step(self, seq_id: int) -> str:
        request_id: str = self._post("optim_step", model_id=self._model, seq_id=seq_id, adam_params={})["request_id"]
        return request_id

    def _post(self, path: str, **body: Any) -> Any:
        return self._api.post(f"/api/v1/{path}", body)


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


def test_a_connection_stays_open_between_requests_for_longer_than_clients_keep_theirs(
    float32_servers: Callable[[str], Served],
) -> None:
    """Where both end it at the same moment, the client's next request fails."""
    where = urlsplit(float32_servers("tiny-qwen3-moe").api.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=SECONDS)
    with contextlib.closing(connection):
        for pause in (0.0, CLIENTS_KEEP_SECONDS + 1.0):
            time.sleep(pause)
            connection.request("GET", "/health")
            connection.auto_open = 0  # from now on the same connection, or an error
            with connection.getresponse() as answer:
                assert answer.status == 200 and answer.read() == b""


def test_two_thousand_long_polls_cost_nobody_an_answer_and_each_gets_its_own(
    float32_servers: Callable[[str], Served], descriptors: int
) -> None:
    """As many as Tinker's SDK has under way. Their call can't run before another one is sent, which is the last."""
    served = float32_servers("tiny-qwen3-moe")
    expected = greedy(served)
    where = urlsplit(served.api.url)
    address = (where.hostname or "", where.port or 0)
    call = WaitingCall(served)
    with contextlib.ExitStack() as open_connections:
        open_connections.callback(call.finish)
        polls = []
        for number in range(min(POLLS, descriptors)):
            polls.append(open_connections.enter_context(socket.create_connection(address, timeout=5 * SECONDS)))
            polls[-1].sendall(request("/api/v1/retrieve_future", {"request_id": call.future}, close=True))
            if number % 100 == 0:
                call.heartbeat()
        assert greedy(served) == expected
        call.send_what_is_missing()
        answers = [until_closed(poll) for poll in polls]
    # One that has waited for 30 s is told to ask again; the others get the outcome: there was no gradient.
    outcomes = [json.loads(answer.partition(b"\r\n\r\n")[2]) for answer in answers]
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert all(one.get("type") == "try_again" or "no gradient" in one["error"] for one in outcomes)
    assert "error" in outcomes[-1]
    assert greedy(served) == expected
