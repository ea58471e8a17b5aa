"""Processes of a real server are stopped, hang or die: health turns red, clients get an error, and what was published
answers after a restart."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from reference.server import hung_processes
from system import forked_server

from kt_runtime.cli import server_process
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.errors import KtError
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
    """A server, its frontend process and the process of a name among its children. `hung`: of `hung_processes`."""

    def __init__(self, api: ServerAPI, model: Path, hung: Path, started: Any) -> None:
        self.api, self.frontend, self.hung, self._started = api, forked_server.frontend_of(model), hung, started
        self.children = self.frontend.children(recursive=True)
        mapped = {Path(region.path) for region in self.child("scheduler").memory_maps()}
        (self.shared_memory,) = [path for path in mapped if path.name.startswith("sglang_loads")]

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

    def status(self) -> int:
        """The server's exit status, once it has ended."""
        status: int = self._started.wait(SECONDS)
        return status

    def listens_no_more(self) -> bool:
        try:
            self.probe()
        except httpx.TransportError:
            return True
        return False

    def has_left_nothing(self) -> bool:
        return not [one for one in self.children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    def stream(self, max_new_tokens: int = 3000) -> list[str]:
        """The lines of an answer that is longer than any test, until the server or the connection ends it."""
        lines: list[str] = []
        sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
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


def has_ended(streamed: list[str]) -> bool:
    """By the end of the connection, and not by an event."""
    return streamed[-1].startswith("the connection ended")


@contextlib.contextmanager
def running(place: Path) -> Iterator[Running]:
    arguments = ["--dtype", "float32", "--max-total-tokens", "4096", "--adapter-dir", str(place / "adapters")]
    started: list[Any] = []

    def start(command: list[str], log_path: Path) -> Any:
        started.append(forked_server.start(command, log_path))
        return started[0]

    (place / "hung").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hung_processes.CONTROL, str(place / "hung"))
        patch.setattr(server_process, "_start", start)
        with server(str(place / "model"), arguments, place / "server.log") as api:
            yield Running(api, place / "model", place / "hung", started[0])


def wire_address(served: Running) -> str:
    address: str = served.api.get("/kt/status")["wire_address"]
    return address


def publish_an_adapter(api: ServerAPI) -> None:
    """As "kept". It is on disk afterwards: until then a server that is killed loses it, as its status says."""
    tokens = np.random.default_rng(0).integers(3, 300, 20).tolist()
    with ResidentClient(api.get("/kt/status")["wire_address"], timeout_s=SECONDS) as client:
        client.create_session("s", LoraSettings(rank=4, alpha=8.0))
        client.forward_backward("s", Batch.from_sequences([tokens], [[*tokens[1:], 0]]))
        client.optim_step("s", learning_rate=0.1)
        client.publish("s", "kept")
    until(lambda: not api.get("/kt/status")["not_stored"])


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
        control.unlink(missing_ok=True)


def is_red_and_refuses(served: Running, why: str) -> None:
    until(lambda: served.probe() == 503)
    assert served.probe("/ready") == 503
    refused = served.ask()
    assert refused.status_code == 503 and f"the server can't answer now: {why}" in refused.text
    assert int(refused.headers["retry-after"]) > 0


def test_a_stopped_or_hung_process_turns_health_red_and_clients_get_an_error_until_it_continues(tmp_path: Path) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    with running(tmp_path) as served:
        publish_an_adapter(served.api)
        base, kept = served.tokens(), served.tokens(lora_path="kept")
        assert base != kept
        for name, sglangs_name in (("detokenizer", "detokenizer"), ("scheduler", "scheduler_0")):
            process = served.child(name)
            with stopped(process):
                is_red_and_refuses(served, f"the {sglangs_name} (process {process.pid}) is stopped by a signal")
            until(lambda: served.probe() == 200 and served.probe("/ready") == 200)
        streamed = served.stream()
        with hanging(served.hung / hung_processes.SCHEDULER):
            is_red_and_refuses(served, "the scheduler")
            until(lambda: "compute nothing and have answered nothing" in "".join(streamed[-2:]))
        until(lambda: served.probe() == 200)
        assert (served.tokens(), served.tokens(lora_path="kept")) == (base, kept)


def kill_the_frontend(served: Running) -> None:
    served.frontend.kill()


def stop_the_frontend(served: Running) -> None:
    served.frontend.suspend()


def hang_the_frontend(served: Running) -> None:
    (served.hung / hung_processes.FRONTEND).touch()


def kill_the_scheduler(served: Running) -> None:
    served.child("scheduler").kill()


def kill_the_detokenizer(served: Running) -> None:
    served.child("detokenizer").kill()


# What ends the server, its exit status, and what the log says.
ENDS: tuple[tuple[Callable[[Running], None], int, str], ...] = (
    (kill_the_frontend, -signal.SIGKILL, ""),
    (stop_the_frontend, -signal.SIGKILL, "is stopped by a signal; the server ends"),
    (hang_the_frontend, -signal.SIGKILL, "hangs: all of its threads sleep; the server ends"),
    (kill_the_scheduler, 1, "one of the server's processes has died"),
    (kill_the_detokenizer, 1, "one of the server's processes has died"),
)


def test_a_server_whose_process_dies_or_whose_frontend_hangs_ends_and_a_restart_has_the_same_adapters(
    tmp_path: Path,
) -> None:
    """Each server begins where the one before it was ended: with its locks, its sockets and its adapters."""
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    answers: list[tuple[list[int], list[int]]] = []
    for end, status, said in ENDS:
        with running(tmp_path) as served:
            if not answers:
                publish_an_adapter(served.api)
            answers.append((served.tokens(), served.tokens(lora_path="kept")))
            streamed = served.stream()
            end(served)
            until(functools.partial(has_ended, streamed))
            assert served.status() == status
            until(served.has_left_nothing)
            assert not served.shared_memory.exists()
            assert said in (tmp_path / "server.log").read_text()
            (served.hung / hung_processes.FRONTEND).unlink(missing_ok=True)
    with running(tmp_path) as served:
        answers.append((served.tokens(), served.tokens(lora_path="kept")))
    base, kept = answers[0]
    assert base != kept and answers == [(base, kept)] * (len(ENDS) + 1)


def test_sigterm_lets_a_stream_finish_while_a_session_trains(tmp_path: Path) -> None:
    """The training call that is under way is not waited for. What was published and saved is there after a restart."""
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    rows = np.random.default_rng(1).integers(3, 700, (64, 257)).tolist()
    long = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
    saved = tmp_path / "saved"
    with running(tmp_path) as served, ResidentClient(wire_address(served), timeout_s=SECONDS) as client:
        publish_an_adapter(served.api)
        kept = served.tokens(lora_path="kept")
        client.save("s", str(saved))
        ticket = client.begin_forward_backward("s", long)
        asked = served.stream(max_new_tokens=40)
        served.frontend.terminate()
        until(lambda: asked[-1] == "data: [DONE]")
        with contextlib.suppress(KtError):  # it may have ended before
            client.finish_forward(ticket, long)
        assert served.status() == 0
        until(served.has_left_nothing)
    with running(tmp_path) as served, ResidentClient(wire_address(served), timeout_s=SECONDS) as client:
        assert served.tokens(lora_path="kept") == kept
        client.create_session("s", LoraSettings(rank=4, alpha=8.0))
        assert client.load("s", str(saved)).step == 1


def test_a_second_sigterm_ends_a_server_that_drains_at_once(tmp_path: Path) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    with running(tmp_path) as served:
        streamed = served.stream()
        served.frontend.terminate()
        until(served.listens_no_more)  # the first signal has been handled
        served.frontend.terminate()
        until(served.has_left_nothing)
        until(functools.partial(has_ended, streamed))  # a drained one has its last event
