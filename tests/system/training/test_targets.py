"""Stated targets on a running server change how training is cut, not its bits. Slices are counted, nothing is timed.

Lengths of time are chosen so that any machine is on the same side: a target of 0.1 ms is below every slice and step, no
target is above.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.main import main
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings

pytestmark = pytest.mark.preset("tiny-qwen3-moe")
NONE = {"tpot_target_ms": None, "ttft_target_ms": None, "train_share": 0.5, "schedule": "slices"}


@pytest.fixture
def session(float32_server: Any) -> Iterator[ResidentClient]:
    """A client with an open session "targets". The settings are as before afterwards."""
    with resident_client(float32_server.api) as client:
        client.create_session("targets", LoraSettings(rank=4, alpha=8.0, targets=["all"], seed=5))
        try:
            yield client
        finally:
            float32_server.api.patch("/kt/settings", NONE)
            client.close_session("targets")


def rows() -> Batch:
    tokens = np.random.default_rng(3).integers(3, 700, (6, 65)).tolist()
    return Batch.from_sequences([row[:-1] for row in tokens], [row[1:] for row in tokens])


def counted(api: ServerAPI) -> tuple[int, int]:
    """Slices, and parts among them, since the start."""
    turns = api.get("/kt/status")["training_turns"]
    return turns["slices"], turns["parts"]


def step(client: ResidentClient, api: ServerAPI) -> tuple[Any, int, int]:
    """A call's loss and log-probabilities, the number of its slices, and of those that were cut."""
    slices, parts = counted(api)
    result = client.forward_backward("targets", rows())
    now = counted(api)
    return (result.loss, [each.tolist() for each in result.logprobs]), now[0] - slices, now[1] - parts


def test_a_target_for_the_first_token_makes_idle_turns_short_and_changes_no_bit(
    session: ResidentClient, float32_server: Any
) -> None:
    api = float32_server.api
    whole, num_whole, cut = step(session, api)
    assert cut == 0
    norm = session.optim_step("targets", 0.0).grad_norm
    api.patch("/kt/settings", {"ttft_target_ms": 0.1})
    parts, num_parts, cut = step(session, api)
    assert cut > num_whole and num_parts > 3 * num_whole
    assert parts == whole
    assert session.optim_step("targets", 0.0).grad_norm == norm  # over every element of the gradient


@contextlib.contextmanager
def stream(api: ServerAPI, new_tokens: int) -> Iterator[Iterator[str]]:
    """The lines of an answer that has begun."""
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "stream": True,
    }
    with httpx.stream("POST", f"{api.url}/generate", json=body, timeout=120) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        yield lines


def test_a_target_that_decoding_uses_up_leaves_training_to_the_time_without_requests(
    session: ResidentClient, float32_server: Any
) -> None:
    api = float32_server.api
    api.patch("/kt/settings", {"tpot_target_ms": 0.1})
    with stream(api, 2000) as lines:  # more than it has decoded when this client, however slow, has counted
        before = counted(api)[0]
        ticket = session.begin_forward_backward("targets", rows())
        for _ in range(20):
            next(lines)
        waiting = counted(api)[0] - before
        api.patch("/kt/settings", {"tpot_target_ms": None})
        session.finish_forward(ticket, rows())
        running = counted(api)[0] - before
        assert any(True for _ in lines), "the answer was still being streamed"
    assert waiting == 0 and running > 10


def test_status_command_and_metrics_show_the_targets(
    session: ResidentClient, float32_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    api = float32_server.api
    with stream(api, 8) as lines:
        list(lines)
    assert main(["settings", "tpot_target_ms=40", "weight.targets=2", "--json", "--url", api.url]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert settings["tpot_target_ms"] == 40 and settings["weights"] == {"targets": 2.0}
    turns = api.get("/kt/status")["training_turns"]
    assert turns["settings"] == settings == api.get("/kt/settings")
    assert turns["num_requests"] > 0 and 0 < turns["tpot_p50_ms"] <= turns["tpot_p95_ms"]
    assert 0 < turns["ttft_p50_ms"] <= turns["ttft_p95_ms"] and 0 <= turns["share_used"] <= 1
    session.forward("targets", rows())
    metrics = httpx.get(f"{api.url}/metrics").text
    assert "kt_runtime:training_tpot_p95_ms" in metrics and "kt_runtime:training_budget_ms" in metrics
    assert main(["settings", "tpot_targt_ms=40", "--url", api.url]) == 2
    assert httpx.patch(f"{api.url}/kt/settings", json={"tpot_target": 40}).status_code == 404
    refused = httpx.patch(f"{api.url}/kt/settings", json={"tpot_target_ms": 20, "train_share": 7})
    assert refused.status_code == 400 and "train_share 7" in refused.text
    assert api.get("/kt/settings") == settings, "nothing of a refused change counts"
    assert main(["settings", "weight.targets=1", "--url", api.url]) == 0
