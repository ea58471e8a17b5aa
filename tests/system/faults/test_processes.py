"""Processes of a real server are stopped, hang or die: health turns red, clients get an error, and what was published
answers after a restart."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from reference.server import hung_scheduler
from system import forked_server

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import ResidentClient
from kt_runtime.wire.batch import Batch
from kt_runtime.wire.messages import LoraSettings

SECONDS = 60.0
PROMPT = [5, 6, 7, 8]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.1)


class Running:
    """A server, its frontend process and the process of a name among its children."""

    def __init__(self, api: ServerAPI, model: Path) -> None:
        self.api, self.frontend = api, forked_server.frontend_of(model)
        self.children = self.frontend.children(recursive=True)

    def child(self, name: str) -> psutil.Process:
        (found,) = [child for child in self.children if name in " ".join(child.cmdline())]
        return found

    def ask(self, **fields: Any) -> httpx.Response:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0}}
        return httpx.post(f"{self.api.url}/generate", json={**body, **fields}, timeout=SECONDS, trust_env=False)

    def tokens(self, **fields: Any) -> list[int]:
        answer = self.ask(**fields)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["output_ids"]
        return tokens

    def probe(self, path: str = "/health") -> int:
        return httpx.get(f"{self.api.url}{path}", timeout=SECONDS, trust_env=False).status_code

    def listens_no_more(self) -> bool:
        try:
            self.probe()
        except httpx.TransportError:
            return True
        return False

    def has_left_nothing(self) -> bool:
        return not [one for one in self.children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    def stream(self) -> list[str]:
        """The lines of an answer that is longer than any test, until the server or the connection ends it."""
        lines: list[str] = []
        sampling = {"max_new_tokens": 3000, "ignore_eos": True}
        body = {"input_ids": PROMPT, "stream": True, "sampling_params": sampling}

        def read() -> None:
            try:
                with httpx.stream(
                    "POST", f"{self.api.url}/generate", json=body, timeout=SECONDS, trust_env=False
                ) as got:
                    lines.extend(line for line in got.iter_lines() if line)
            except httpx.TransportError as error:
                lines.append(f"the connection ended: {type(error).__name__}")

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        until(lambda: bool(lines))
        return lines


@contextlib.contextmanager
def running(place: Path, control: Path) -> Iterator[Running]:
    arguments = ["--dtype", "float32", "--max-total-tokens", "4096", "--adapter-dir", str(place / "adapters")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hung_scheduler.CONTROL, str(control))
        with server(str(place / "model"), arguments, place / "server.log") as api:
            yield Running(api, place / "model")


def publish_an_adapter(api: ServerAPI) -> None:
    tokens = np.random.default_rng(0).integers(3, 300, 20).tolist()
    with ResidentClient(api.get("/kt/status")["wire_address"], timeout_s=SECONDS) as client:
        client.create_session("s", LoraSettings(rank=4, alpha=8.0))
        client.forward_backward("s", Batch.from_sequences([tokens], [[*tokens[1:], 0]]))
        client.optim_step("s", learning_rate=0.1)
        client.publish("s", "kept")


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@contextlib.contextmanager
def hanging(control: Path) -> Iterator[None]:
    control.touch()
    try:
        yield
    finally:
        control.unlink()


def is_red_and_refuses(served: Running, why: str) -> None:
    until(lambda: served.probe() == 503)
    assert served.probe("/ready") == 503
    refused = served.ask()
    assert refused.status_code == 503 and f"the server can't answer now: {why}" in refused.text
    assert int(refused.headers["retry-after"]) > 0


def test_stopped_hung_and_killed_processes_are_noticed_and_what_was_published_answers_again(tmp_path: Path) -> None:
    control = tmp_path / "control"
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    with running(tmp_path, control) as served:
        publish_an_adapter(served.api)
        base, kept = served.tokens(), served.tokens(lora_path="kept")
        assert base != kept
        for name, sglangs_name in (("detokenizer", "detokenizer"), ("scheduler", "scheduler_0")):
            process = served.child(name)
            with stopped(process):
                is_red_and_refuses(served, f"the {sglangs_name} (process {process.pid}) is stopped by a signal")
            until(lambda: served.probe() == 200 and served.probe("/ready") == 200)
        streamed = served.stream()
        with hanging(control):
            is_red_and_refuses(served, "the scheduler")
            until(lambda: "compute nothing and have answered nothing" in "".join(streamed[-2:]))
        until(lambda: served.probe() == 200)
        assert (served.tokens(), served.tokens(lora_path="kept")) == (base, kept)
        served.frontend.kill()
        until(served.has_left_nothing)
    with running(tmp_path, control) as served:
        assert (served.tokens(), served.tokens(lora_path="kept")) == (base, kept)
        streamed = served.stream()
        served.child("detokenizer").kill()
        until(lambda: streamed[-1].startswith("the connection ended"))
        until(served.has_left_nothing)
        until(lambda: not served.frontend.is_running() or served.frontend.status() == psutil.STATUS_ZOMBIE)
    assert "one of the server's processes has died" in (tmp_path / "server.log").read_text()


def test_a_second_sigterm_ends_a_server_that_drains_at_once(tmp_path: Path) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    with running(tmp_path, tmp_path / "control") as served:
        streamed = served.stream()
        served.frontend.terminate()
        until(served.listens_no_more)  # the first signal has been handled
        served.frontend.terminate()
        until(served.has_left_nothing)
        until(lambda: streamed[-1].startswith("the connection ended"))  # a drained one has its last event
