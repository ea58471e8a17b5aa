"""NaN, infinity and numbers that overflow reach a real server in data, losses, gradients, steps and adapters. Each ends
the call that brought it. What was published stays, and other users' answers keep their bits."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import zmq
from reference import lora
from system.conftest import Served

from kt_runtime.cli.connection import resident_client
from kt_runtime.errors import AdapterError, ConflictError, NumericsError
from kt_runtime.wire import Batch, ResidentClient, codec
from kt_runtime.wire.messages import ForwardBackward, LoraSettings
from kt_runtime.wire.replies import ErrorReply

SECONDS = 120.0
NUMBERS = (float("nan"), float("inf"), float("-inf"))


def batch(weight: float = 1.0) -> Batch:
    rows = np.random.default_rng(6).integers(3, 700, (2, 17)).tolist()
    return Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows], weights=[[weight] * 16] * 2)


class Neighbour:
    """A user of the base and of a published adapter, who asks the same again and again. `answers`: tokens and their
    log-probabilities, as JSON: the same text is the same bits."""

    def __init__(self, served: Served, adapters: list[str | None]) -> None:
        self._url, self._adapters, self._leave = served.api.url, adapters, threading.Event()
        self.answers: set[str] = set()
        self.num_asked = 0
        self._thread = threading.Thread(target=self._ask)

    def ask(self) -> str:
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        body = {"input_ids": [[5, 6, 7, 8]] * len(self._adapters), "lora_path": self._adapters}
        body |= {"sampling_params": sampling, "return_logprob": True}
        answer = httpx.post(f"{self._url}/generate", json=body, timeout=SECONDS, trust_env=False)
        assert answer.status_code == 200, answer.text
        return json.dumps([[one["output_ids"], one["meta_info"]["output_token_logprobs"]] for one in answer.json()])

    def _ask(self) -> None:
        while not self._leave.is_set():
            self.answers.add(self.ask())
            self.num_asked += 1

    def __enter__(self) -> Neighbour:
        self.answers.add(self.ask())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join()


@pytest.fixture
def served(float32_servers: Callable[[str], Served]) -> Served:
    return float32_servers("tiny-qwen3-moe")


@pytest.fixture
def client(served: Served) -> Iterator[ResidentClient]:
    with resident_client(served.api, timeout_s=SECONDS) as opened:
        yield opened


@pytest.fixture
def neighbour(served: Served, client: ResidentClient) -> Iterator[Neighbour]:
    """Beside a session `s`, which has published `finite` and then computed a gradient."""
    client.create_session("s", LoraSettings(rank=4, alpha=8.0, seed=1))
    client.forward_backward("s", batch())
    client.optim_step("s", 0.01)
    client.publish("s", "finite")
    try:
        with Neighbour(served, [None, "finite"]) as asking:
            yield asking
        assert len(asking.answers) == 1, "a neighbour's answer has changed"
        assert asking.num_asked > 0
    finally:
        client.close_session("s")
        served.api.delete("/kt/adapters/finite")


def config_of(served: Served) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((served.model_directory / "config.json").read_text(encoding="utf-8"))
    return config


def step_of(client: ResidentClient) -> int:
    return next(info.step for info in client.status(wait_s=0).sessions if info.session == "s")


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_data_that_is_not_finite_is_refused_whoever_sends_it(
    client: ResidentClient, neighbour: Neighbour, number: float
) -> None:
    """As frames, since kt-runtime's own client refuses to send it."""
    good = batch()
    request = ForwardBackward(request_id=f"not-finite-{number}", session="s", lengths=good.lengths)
    arrays = {"tokens": good.tokens, "targets": good.targets, "weights": good.weights}
    frames = codec.encode(request, arrays)
    weights = good.weights.copy()
    weights[3] = number
    (at,) = [index for index, frame in enumerate(frames) if bytes(frame) == good.weights.tobytes()]
    frames[at] = weights.tobytes()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(client.address)
        socket.send_multipart(frames)
        assert socket.poll(int(SECONDS * 1000))
        reply = next(reply for reply in map(error_in, socket.recv_multipart()) if reply)
    assert reply.category == "user" and "weights" in reply.message, reply
    with pytest.raises(ConflictError, match="gradient"):  # nothing was added
        client.optim_step("s", 0.01)


def error_in(frame: bytes) -> ErrorReply | None:
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.msgpack.decode(frame, type=ErrorReply)
    return None


def test_a_loss_that_overflows_fails_its_call_and_adds_nothing(client: ResidentClient, neighbour: Neighbour) -> None:
    expected = client.forward("s", batch()).loss
    client.forward_backward("s", batch())
    with pytest.raises(NumericsError, match="loss"):
        client.forward_backward("s", batch(3e38))
    client.optim_step("s", 0.01)  # of the first call alone
    with_gradient_of_one = client.forward("s", batch()).loss
    assert step_of(client) == 2 and with_gradient_of_one < expected


def test_a_gradient_that_overflows_makes_no_step_and_the_next_one_is_right(
    client: ResidentClient, neighbour: Neighbour
) -> None:
    before = client.forward("s", batch()).loss
    client.forward_backward("s", batch(1e36))
    with pytest.raises(NumericsError, match="no step was made"):
        client.optim_step("s", 0.01)
    assert step_of(client) == 1 and client.forward("s", batch()).loss == before
    client.forward_backward("s", batch())
    client.optim_step("s", 0.01)
    assert step_of(client) == 2 and client.forward("s", batch()).loss < before


def test_masters_that_overflow_are_not_published_and_the_version_before_answers(
    served: Served, client: ResidentClient, neighbour: Neighbour, tmp_path: Path
) -> None:
    version = served.api.get("/kt/adapters/finite")["current"]
    client.load("s", str(lora.write_adapter(tmp_path / "huge", lora.huge_adapter(config_of(served)))))
    with pytest.raises(AdapterError, match="'finite': its forward pass is not finite"):
        client.publish("s", "finite")
    with pytest.raises(NumericsError):
        client.forward_backward("s", batch())
    assert served.api.get("/kt/adapters/finite")["current"] == version


def test_an_adapter_that_overflows_is_refused_over_http(served: Served, neighbour: Neighbour, tmp_path: Path) -> None:
    huge = lora.write_adapter(tmp_path / "huge", lora.huge_adapter(config_of(served)))
    body = {"name": "huge", "path": str(huge)}
    answer = httpx.post(f"{served.api.url}/kt/adapters", json=body, timeout=SECONDS, trust_env=False)
    assert answer.status_code == 400 and "not finite" in answer.json()["error"]["message"]
    assert "huge" not in [adapter["name"] for adapter in served.api.get("/kt/adapters")["adapters"]]
