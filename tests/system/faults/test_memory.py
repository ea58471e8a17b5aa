"""A real server's scheduler gets no more memory in the middle of a training call: the call ends, and nothing else."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from system import forked_server
from system.conftest import Served

from kt_runtime.cli.connection import resident_client
from kt_runtime.errors import RuntimeFault
from kt_runtime.wire.batch import Batch
from kt_runtime.wire.messages import LoraSettings

pytestmark = pytest.mark.preset("tiny-qwen3-moe")
ROOM_BYTES = 1 << 20


def batch(rows: int, tokens: int) -> Batch:
    ids = np.random.default_rng(6).integers(3, 700, (rows, tokens + 1)).tolist()
    return Batch.from_sequences([row[:-1] for row in ids], [row[1:] for row in ids])


def answer(served: Served) -> Any:
    sampling = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
    return served.api.post("/generate", {"input_ids": [5, 6, 7, 8], "sampling_params": sampling})["output_ids"]


@contextlib.contextmanager
def without_memory(process: psutil.Process) -> Iterator[None]:
    """The system refuses the process more than ROOM_BYTES beside what it has."""
    before = resource.prlimit(process.pid, resource.RLIMIT_AS)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (process.memory_info().vms + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_AS, before)


def test_a_training_call_without_memory_ends_alone(float32_server: Served) -> None:
    children = forked_server.frontend_of(float32_server.model_directory).children(recursive=True)
    (scheduler,) = [child for child in children if "scheduler" in " ".join(child.cmdline())]
    expected = answer(float32_server)
    with resident_client(float32_server.api, timeout_s=60.0) as client:
        client.create_session("short", LoraSettings(rank=4, alpha=8.0, seed=1))
        loss = client.forward_backward("short", batch(2, 16)).loss
        with without_memory(scheduler):
            with pytest.raises(RuntimeFault, match=r"memory|MemoryError"):
                client.forward_backward("short", batch(16, 500))
            assert answer(float32_server) == expected
        client.optim_step("short", 0.01)  # of the small call's gradient
        assert client.forward("short", batch(2, 16)).loss < loss
        assert np.isfinite(client.forward_backward("short", batch(16, 500)).loss)
        client.close_session("short")
    assert answer(float32_server) == expected
