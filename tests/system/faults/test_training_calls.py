"""Calls of the Tinker API that are repeated, come in another order or from two clients, or meet a restarted server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from system import forked_server
from system.conftest import Served

from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model

SECONDS = 120.0
BASE = "model"
"""The server names the model after its directory."""


class Client:
    """A client of the Tinker API without the SDK: it sends what it is told to, when it is told to."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=SECONDS, trust_env=False)
        self.session = self.post("create_session", tags=[], user_metadata=None, sdk_version="0.7.0")["session_id"]

    def ask(self, path: str, /, **body: Any) -> httpx.Response:
        return self._http.post(path, json=body)

    def post(self, path: str, /, **body: Any) -> dict[str, Any]:
        answer = self.ask(path, **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def result(self, request_id: str) -> dict[str, Any]:
        while (found := self.post("retrieve_future", request_id=request_id)).get("type") == "try_again":
            self.post("session_heartbeat", session_id=self.session)
        return found

    def model(self, number: int = 0) -> str:
        lora = {"rank": 4, "seed": 1, "train_unembed": False, "train_mlp": True, "train_attn": True}
        opened = self.post(
            "create_model", session_id=self.session, model_seq_id=number, base_model=BASE, lora_config=lora
        )
        model: str = self.result(opened["request_id"])["model_id"]
        return model

    def step(self, model: str, seq_id: int) -> str:
        """Asks for an optimizer step; the future's id."""
        adam = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        request_id: str = self.post("optim_step", model_id=model, seq_id=seq_id, adam_params=adam)["request_id"]
        return request_id

    def gradient(self, model: str, seq_id: int, seed: int = 0) -> str:
        """Asks for a gradient; the future's id."""
        body = {"forward_backward_input": one_sequence(seed), "model_id": model, "seq_id": seq_id}
        request_id: str = self.post("forward_backward", **body)["request_id"]
        return request_id

    def finish(self) -> None:
        self.ask(f"sessions/{self.session}/finish", reason={"type": "success"})
        self._http.close()


def one_sequence(seed: int) -> dict[str, Any]:
    tokens = np.random.default_rng(seed).integers(3, 700, 9).tolist()
    inputs = {
        "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [8]},
        "weights": {"data": [1.0] * 8, "dtype": "float32", "shape": [8]},
    }
    chunks = [{"tokens": tokens[:-1], "type": "encoded_text"}]
    data = [{"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}]
    return {"data": data, "loss_fn": "cross_entropy"}


def loss_of(result: dict[str, Any]) -> float:
    loss: float = result["metrics"]["loss:sum"]
    return loss


@pytest.fixture
def served(float32_servers: Callable[[str], Served]) -> Served:
    return float32_servers("tiny-qwen3-moe")


def steps_of(served: Served, model: str) -> int:
    """That the resident has made."""
    sessions = {session["session"]: session for session in served.api.get("/kt/status")["sessions"]}
    return int(sessions[model.replace(":", ".")]["step"])


def test_repeated_and_reversed_calls_are_carried_out_once_and_in_order(served: Served) -> None:
    """Two runs with the same calls, one of them sent backwards and each twice: the losses are the same."""
    client = Client(served.api.url)
    plain, reversed_ = client.model(0), client.model(1)
    expected = [client.gradient(plain, 1), client.step(plain, 2), client.gradient(plain, 3, 1), client.step(plain, 4)]
    losses = [loss_of(client.result(expected[at])) for at in (0, 2)]
    client.result(expected[3])

    def send_backwards() -> list[str]:
        calls = [client.step(reversed_, 4), client.gradient(reversed_, 3, 1)]
        return [*calls, client.step(reversed_, 2), client.gradient(reversed_, 1)][::-1]

    calls = send_backwards()
    assert send_backwards() == calls
    assert [loss_of(client.result(calls[at])) for at in (0, 2)] == losses
    client.result(calls[3])
    assert send_backwards() == calls  # also after they have ended
    assert steps_of(served, plain) == steps_of(served, reversed_) == 2
    client.finish()


def test_a_second_client_of_a_run_gets_the_calls_that_are_there_and_makes_none_twice(served: Served) -> None:
    first, second = Client(served.api.url), Client(served.api.url)
    model = first.model()
    calls = [first.gradient(model, 1), first.step(model, 2)]
    assert [second.gradient(model, 1, seed=7), second.step(model, 2)] == calls  # whatever it would have asked for
    assert loss_of(first.result(calls[0])) == loss_of(second.result(calls[0]))
    third = second.gradient(model, 3)
    assert loss_of(second.result(third)) < loss_of(first.result(calls[0]))  # after the step
    assert steps_of(served, model) == 1
    second.finish()  # the run is the first one's
    assert "error" not in first.result(first.step(model, 4))
    first.finish()


@pytest.mark.parametrize("seq_id", [-1, 0, 2**31 - 1, 2**63, 1.5, "1", True])
def test_a_place_that_can_not_be_holds_nobody_up(served: Served, seq_id: Any) -> None:
    client = Client(served.api.url)
    model = client.model()
    answer = client.ask("optim_step", model_id=model, seq_id=seq_id, adam_params={"learning_rate": 0.01})
    assert answer.status_code in (200, 400, 422) and answer.text
    assert loss_of(client.result(client.gradient(model, 1))) > 0
    assert "error" not in client.result(client.step(model, 2))
    client.finish()


def test_after_a_restart_old_futures_are_gone_and_the_run_continues_from_what_it_saved(tmp_path: Path) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    options = ["--dtype", "float32", "--max-total-tokens", "4096", "--adapter-dir", str(tmp_path / "adapters")]
    with server(str(tmp_path / "model"), options, tmp_path / "first.log") as api:
        client = Client(api.url)
        model = client.model()
        client.gradient(model, 1)
        client.result(client.step(model, 2))
        saved = client.post("save_weights", model_id=model, path="kept", seq_id=3)["request_id"]
        path = client.result(saved)["path"]
        loss = loss_of(client.result(client.gradient(model, 4)))
        waiting = client.step(model, 6)  # call 5 is missing
        frontend = forked_server.frontend_of(tmp_path / "model")
        frontend.kill()
        psutil.wait_procs([frontend], timeout=SECONDS)
    with server(str(tmp_path / "model"), options, tmp_path / "second.log") as api:
        old, client = client, Client(api.url)
        for request_id in (saved, waiting):
            answer = client.ask("retrieve_future", request_id=request_id)
            assert answer.status_code == 410 and "restarted" in answer.json()["detail"]
        assert client.ask("session_heartbeat", session_id=old.session).status_code == 410
        refused = client.ask("optim_step", model_id=model, seq_id=5, adam_params={"learning_rate": 0.01})
        assert refused.status_code == 404 and "continue from a checkpoint" in refused.json()["detail"]
        opened = client.post(
            "load_weights", session_id=client.session, model_seq_id=0, path=path, optimizer=True, base_model=BASE
        )
        continued = client.result(opened["request_id"])["model_id"]
        assert loss_of(client.result(client.gradient(continued, 1))) == loss
        client.finish()
