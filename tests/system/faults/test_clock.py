"""The wall clock of a real server jumps by years, forward and back: nothing times out, expires or stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from reference.server import changed_processes

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import ResidentClient
from kt_runtime.wire.batch import Batch
from kt_runtime.wire.messages import LoraSettings

SECONDS = 60.0
YEAR_S = 365 * 86400
JUMPS_S = (10 * YEAR_S, -10 * YEAR_S, 0, -1)
WATCHED_S = 1.5  # longer than the pauses between the checks of processes and leases


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(changed_processes.JUMPED_CLOCK, str(tmp_path / "clock"))
    return tmp_path / "clock"


@pytest.fixture
def api(tmp_path: Path, clock: Path) -> Iterator[ServerAPI]:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    arguments = ["--dtype", "float32", "--max-total-tokens", "8192", "--adapter-dir", str(tmp_path / "adapters")]
    arguments += ["--tinker-timeout", "30"]
    with server(str(tmp_path / "model"), arguments, tmp_path / "server.log") as started:
        yield started


def answer(api: ServerAPI, **fields: Any) -> list[int]:
    sampling = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, **fields}
    tokens: list[int] = api.post("/generate", body)["output_ids"]
    return tokens


def jump(clock: Path, seconds: int) -> None:
    """At once: a reader sees the old content or the new one."""
    fresh = clock.with_suffix(".new")
    fresh.write_text(str(seconds))
    fresh.rename(clock)


def batch() -> Batch:
    rows = np.random.default_rng(6).integers(3, 700, (2, 17)).tolist()
    return Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])


def streamed(api: ServerAPI) -> list[str]:
    """The lines of an answer that is longer than the test, as they come."""
    lines: list[str] = []
    body = {"input_ids": [9, 8, 7], "stream": True, "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}

    def read() -> None:
        try:
            with httpx.stream("POST", f"{api.url}/generate", json=body, timeout=SECONDS, trust_env=False) as got:
                lines.extend(line for line in got.iter_lines() if line)
        except httpx.TransportError as error:
            lines.append(f"ended: {type(error).__name__}")

    threading.Thread(target=read, daemon=True).start()
    return lines


def test_a_clock_that_jumps_ends_no_stream_session_or_health(api: ServerAPI, clock: Path) -> None:
    tinker = api.post("/api/v1/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})["session_id"]
    with ResidentClient(api.get("/kt/status")["wire_address"], timeout_s=SECONDS) as client:
        client.create_session("s", LoraSettings(rank=4, alpha=8.0, seed=1))
        client.forward_backward("s", batch())
        client.optim_step("s", learning_rate=0.1)
        client.publish("s", "tuned")
        expected, losses = (answer(api), answer(api, lora_path="tuned")), {client.forward("s", batch()).loss}
        for seconds in JUMPS_S:
            lines = streamed(api)
            jump(clock, seconds)
            until = time.monotonic() + WATCHED_S
            while time.monotonic() < until or not lines:
                for path in ("/health", "/ready"):
                    assert httpx.get(f"{api.url}{path}", timeout=SECONDS, trust_env=False).status_code == 200
                assert (answer(api), answer(api, lora_path="tuned")) == expected
                time.sleep(0.1)
            losses.add(client.forward("s", batch()).loss)
            assert api.post("/api/v1/session_heartbeat", {"session_id": tinker})
            assert not [line for line in lines if line.startswith("ended") or "error" in line]
            httpx.post(f"{api.url}/abort_request", json={"abort_all": True, "rid": ""}, trust_env=False)
        assert len(losses) == 1
        client.close_session("s")
