"""A real server's checkpoints: the disk is full, fails or hangs, or the server is killed (SIGKILL) while it writes one.
What loads afterwards has weights and moments of one step."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from reference.cache import faulty_disk
from reference.server import changed_processes
from system import forked_server

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.errors import InvalidValueError, KtError, RuntimeFault
from kt_runtime.files import visible_entries
from kt_runtime.resident.training.checkpoint import OPTIMIZER_FILE
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import ResidentClient
from kt_runtime.wire.batch import Batch
from kt_runtime.wire.messages import LoraSettings, OptimStep

SECONDS = 60.0
WRITING = ("open", "make", "write", "sync")


def batch() -> Batch:
    rows = np.random.default_rng(6).integers(3, 700, (2, 17)).tolist()
    return Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])


def a_step(client: ResidentClient) -> float:
    """The loss before the step."""
    loss = client.forward_backward("s", batch()).loss
    client.optim_step("s", 0.01)
    return loss


def answers(api: ServerAPI) -> bool:
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    return len(api.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling})["output_ids"]) == 4


def the_disk_fails_and_hangs(api: ServerAPI, client: ResidentClient, saved: Path, control: Path) -> None:
    """Each failing save ends alone and leaves nothing; while one hangs, requests and training go on."""

    def fault(what: dict[str, object]) -> None:
        control.with_suffix(".new").write_text(json.dumps({"directory": str(saved.parent), **what}))
        os.replace(control.with_suffix(".new"), control)

    saved.parent.mkdir()
    for operations, number, kind in (
        (("sync",), "ENOSPC", InvalidValueError),
        (WRITING, "EDQUOT", InvalidValueError),
        (("sync",), "EIO", RuntimeFault),
        ((*WRITING, "remove", "rename"), "EIO", RuntimeFault),  # as of a disk that is gone
    ):
        fault({"fail": dict.fromkeys(operations, number)})
        with pytest.raises(kind, match=r"saved.*can't be written"):
            client.save("s", str(saved))
        assert answers(api) and not list(saved.parent.iterdir())
    fault({"hang": WRITING})
    with resident_client(api, timeout_s=SECONDS) as saving:
        thread = threading.Thread(target=lambda: saving.save("s", str(saved)))
        thread.start()
        a_step(client)
        assert answers(api) and thread.is_alive() and not saved.exists()
        control.unlink()
        thread.join(SECONDS)
    assert saved.exists() and visible_entries(saved.parent) == [saved]


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_server_killed_between_weights_and_moments_leaves_a_checkpoint_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps after a load show both: the weights in the first loss, the moments in those after it. The second server
    is killed in an optimizer step."""
    control, saved = tmp_path / "control", tmp_path / "saved" / "state"
    monkeypatch.setenv(faulty_disk.CONTROL, str(tmp_path / "faults.json"))
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    monkeypatch.setenv(changed_processes.KILLED_AT, str(control))
    arguments = ["--dtype", "float32", "--max-total-tokens", "4096", "--adapter-dir", str(tmp_path / "adapters")]
    with server(str(tmp_path / "model"), arguments, tmp_path / "first.log") as api:
        frontend = forked_server.frontend_of(tmp_path / "model")
        with resident_client(api, timeout_s=SECONDS) as client:
            client.create_session("s", LoraSettings(rank=4, alpha=8.0, seed=1))
            a_step(client)
            the_disk_fails_and_hangs(api, client, saved, tmp_path / "faults.json")
            client.save("s", str(saved), replace=True)
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
        following = [a_step(client) for _ in range(2)]
        client.forward_backward("s", batch())
        client.submit(OptimStep(request_id="unfinished", session="s", learning_rate=0.01))
        forked_server.frontend_of(tmp_path / "model").kill()  # the resident is at some point of the step, or before it
    with server(str(tmp_path / "model"), arguments, tmp_path / "third.log") as api, resident_client(api) as client:
        client.create_session("s", LoraSettings(rank=4, alpha=8.0, seed=9))
        assert client.load("s", str(saved)).step == 5
        assert [a_step(client) for _ in range(2)] == following
