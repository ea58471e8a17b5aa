"""A real server's scheduler gets no more memory in the middle of a training call: the call ends, and nothing else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.server import changed_processes

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.errors import RuntimeFault
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire.batch import Batch
from kt_runtime.wire.messages import LoraSettings

SECONDS = 120.0  # on a machine that does other things too


def batch(rows: int, tokens: int) -> Batch:
    ids = np.random.default_rng(6).integers(3, 700, (rows, tokens + 1)).tolist()
    return Batch.from_sequences([row[:-1] for row in ids], [row[1:] for row in ids])


def answer(api: ServerAPI) -> Any:
    sampling = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
    return api.post("/generate", {"input_ids": [5, 6, 7, 8], "sampling_params": sampling})["output_ids"]


@contextlib.contextmanager
def without_memory(control: Path) -> Iterator[None]:
    """The scheduler's process gets little more than it uses, also of what other calls have freed."""
    control.touch()
    end = time.monotonic() + SECONDS
    while control.read_text() != changed_processes.FILLED:
        assert time.monotonic() < end
        time.sleep(0.05)
    try:
        yield
    finally:
        control.unlink()


def test_a_training_call_without_memory_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    control = tmp_path / "control"
    monkeypatch.setenv(changed_processes.NO_MEMORY, str(control))
    options = ["--dtype", "float32", "--max-total-tokens", "4096", "--adapter-dir", str(tmp_path / "adapters")]
    with server(str(tmp_path / "model"), options, tmp_path / "server.log") as api:
        expected = answer(api)
        with resident_client(api, timeout_s=SECONDS) as client:
            client.create_session("earlier", LoraSettings(rank=4, alpha=8.0, seed=1))
            client.forward_backward("earlier", batch(16, 500))  # the allocator keeps some of the memory that it frees
            client.close_session("earlier")
            client.create_session("short", LoraSettings(rank=4, alpha=8.0, seed=1))
            loss = client.forward_backward("short", batch(2, 16)).loss
            with without_memory(control):
                with pytest.raises(RuntimeFault, match=r"memory|MemoryError"):
                    client.forward_backward("short", batch(16, 500))
                assert answer(api) == expected
            client.optim_step("short", 0.01)  # of the small call's gradient
            assert client.forward("short", batch(2, 16)).loss < loss
            assert np.isfinite(client.forward_backward("short", batch(16, 500)).loss)
            client.close_session("short")
        assert answer(api) == expected
