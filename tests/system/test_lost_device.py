"""A real server whose device is lost ends with status 1 and a line that says so; no request or session hangs.

The error is PyTorch's own, raised in the server's process where a GPU's would be (`reference/lost_device.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from reference.on_device import lost_device
from system import forked_server

from kt_runtime.cli import server_process
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.errors import KtError
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import ResidentClient
from kt_runtime.wire.batch import Batch
from kt_runtime.wire.messages import LoraSettings

END_SECONDS = 60.0


def generate(api: ServerAPI) -> httpx.Response:
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    return httpx.post(f"{api.url}/generate", json=body, timeout=END_SECONDS, trust_env=False)


def serve_a_request(api: ServerAPI, _address: str) -> None:
    with pytest.raises(httpx.TransportError):
        generate(api)


def train_a_step(_api: ServerAPI, address: str) -> None:
    tokens = np.random.default_rng(0).integers(3, 300, 20).tolist()
    with ResidentClient(address, timeout_s=END_SECONDS) as client, pytest.raises(KtError):
        client.create_session("s", LoraSettings(rank=4, alpha=8.0))
        client.forward_backward("s", Batch.from_sequences([tokens], [[*tokens[1:], 0]]))


@pytest.mark.parametrize(("when", "use"), [("serving", serve_a_request), ("training", train_a_step)])
def test_a_server_whose_device_is_lost_ends_and_says_so(
    when: str, use: Callable[[ServerAPI, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    control, log = tmp_path / "control", tmp_path / "server.log"
    monkeypatch.setenv(lost_device.CONTROL, str(control))
    started: list[Any] = []

    def start(command: list[str], log_path: Path) -> Any:
        started.append(forked_server.start(command, log_path))
        return started[0]

    monkeypatch.setattr(server_process, "_start", start)
    arguments = ["--dtype", "float32", "--max-total-tokens", "1024", "--adapter-dir", str(tmp_path / "adapters")]
    with server(str(tmp_path / "model"), arguments, log) as api:
        assert generate(api).status_code == 200
        address = api.get("/kt/status")["wire_address"]
        children = psutil.Process(started[0].pid).children(recursive=True)
        control.write_text(when)
        with ThreadPoolExecutor() as threads:
            used = threads.submit(use, api, address)
            assert started[0].wait(END_SECONDS) == 1
            used.result(END_SECONDS)
    lines = log.read_text()
    assert f"nothing can be computed any more: {lost_device.ERROR}" in lines
    assert "kt-runtime: the device is lost: it is gone, or a kernel on it has failed" in lines
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
