"""A real server is killed (SIGKILL) while it writes a checkpoint: weights and moments that load are of one step."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from reference.server import changed_processes
from system import forked_server

from kt_runtime.cli.connection import resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.errors import KtError
from kt_runtime.files import visible_entries
from kt_runtime.resident.training.checkpoint import OPTIMIZER_FILE
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import ResidentClient
from kt_runtime.wire.batch import Batch
from kt_runtime.wire.messages import LoraSettings

SECONDS = 60.0


def batch() -> Batch:
    rows = np.random.default_rng(6).integers(3, 700, (2, 17)).tolist()
    return Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])


def a_step(client: ResidentClient) -> float:
    """The loss before the step."""
    loss = client.forward_backward("s", batch()).loss
    client.optim_step("s", 0.01)
    return loss


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_server_killed_between_weights_and_moments_leaves_a_checkpoint_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps after a load show both: the weights in the first loss, the moments in those after it."""
    control, saved = tmp_path / "control", tmp_path / "saved" / "state"
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    monkeypatch.setenv(changed_processes.KILLED_AT, str(control))
    arguments = ["--dtype", "float32", "--max-total-tokens", "4096", "--adapter-dir", str(tmp_path / "adapters")]
    with server(str(tmp_path / "model"), arguments, tmp_path / "first.log") as api:
        frontend = forked_server.frontend_of(tmp_path / "model")
        with resident_client(api, timeout_s=SECONDS) as client:
            client.create_session("s", LoraSettings(rank=4, alpha=8.0, seed=1))
            a_step(client)
            a_step(client)
            client.save("s", str(saved))
            following = [a_step(client) for _ in range(3)]
            control.write_text(OPTIMIZER_FILE)
            with pytest.raises(KtError):
                client.save("s", str(saved), replace=True)
        deadline = time.monotonic() + SECONDS
        while not has_ended(frontend):
            assert time.monotonic() < deadline, "the server outlives its scheduler"
            time.sleep(0.1)
    control.unlink()
    (half,) = [entry for entry in saved.parent.iterdir() if entry != saved]
    assert any(half.iterdir()) and not (half / OPTIMIZER_FILE).exists(), "was not killed between the two"
    assert visible_entries(saved.parent) == [saved]
    with server(str(tmp_path / "model"), arguments, tmp_path / "second.log") as api, resident_client(api) as client:
        client.create_session("s", LoraSettings(rank=4, alpha=8.0, seed=9))
        assert client.load("s", str(saved)).step == 2
        assert [a_step(client) for _ in range(3)] == following
        client.save("s", str(saved), replace=True)
    assert visible_entries(saved.parent) == [saved]
