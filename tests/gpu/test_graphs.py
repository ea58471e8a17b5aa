"""SGLang's breakable graphs around CPU experts, on a GPU: first the break alone, then real servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from reference.on_device.graphs import *  # noqa: F403
from reference.parity import Agreement, sampled
from reference.place import Place

from kt_runtime.bench.gpu.settings import NO_GRAPHS
from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings

PRESETS = ("tiny-deepseek-v3", "tiny-qwen3-moe")
LOG_EACH_BATCH = ("--decode-log-interval", "1")


@dataclass
class Servers:
    """The same model served with graphs and eagerly."""

    captured: ServerAPI
    eager: ServerAPI
    log: Path


@pytest.fixture(scope="module", params=PRESETS)
def servers(
    request: pytest.FixtureRequest, place: Place, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    directory = tmp_path_factory.mktemp("graphs")
    make_model(request.param, directory / "model", seed=6)

    def options(name: str, *own: str) -> list[str]:
        named = ["--adapter-dir", str(directory / name), "--max-lora-rank", "8", *own]
        return place.arguments(named, LOG_EACH_BATCH)

    model, log = str(directory / "model"), directory / "captured.log"
    with (
        server(model, options("captured"), log) as captured,
        server(model, options("eager", NO_GRAPHS), directory / "eager.log") as eager,
    ):
        yield Servers(captured, eager, log)


@pytest.fixture
def client(servers: Servers) -> Iterator[ResidentClient]:
    with resident_client(servers.captured) as opened:
        yield opened


def scored(api: ServerAPI, rows: list[list[int]]) -> list[np.ndarray]:
    """Log-probabilities of every token but the first, by one prefill of each row, of at most 512 tokens together."""
    found = []
    for row in rows:
        body = {
            "input_ids": row,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        meta = api.post("/generate", body)["meta_info"]
        found.append(np.array([item[0] for item in meta["input_token_logprobs"][1:]]))
    return found


def test_batches_replay_graphs(servers: Servers) -> None:
    sampled(servers.captured, None)
    log = servers.log.read_text(errors="replace")
    for phase in ("decode", "prefill"):
        assert re.search(rf"Capture target {phase} .* graph begin\. backend=breakable", log)
    assert any("Decode batch" in line and "graph: True" in line for line in log.splitlines())


def test_captured_decode_steps_have_the_log_probabilities_of_eager_passes(servers: Servers, place: Place) -> None:
    rows, logprobs = sampled(servers.captured, None)
    place.check(Agreement.of(scored(servers.eager, rows), logprobs))


def test_captured_prefills_have_the_log_probabilities_of_eager_passes(servers: Servers, place: Place) -> None:
    rows, _ = sampled(servers.eager, None)
    for one, other in zip(scored(servers.captured, rows), scored(servers.eager, rows), strict=True):
        place.check_same(one, other)


def tune(client: ResidentClient, name: str, seed: int, steps: int = 2) -> None:
    """Trains a session and publishes it as `name`; each call makes another version."""
    tokens = np.random.default_rng(seed).integers(3, 700, (4, 33)).tolist()
    batch = Batch.from_sequences([row[:-1] for row in tokens], [row[1:] for row in tokens])
    client.create_session(name, LoraSettings(rank=8, alpha=16, seed=seed))
    for _ in range(steps):
        client.forward_backward(name, batch)
        client.optim_step(name, 0.02)
    client.publish(name, name)


def test_a_version_published_after_the_capture_is_what_answers(
    servers: Servers, client: ResidentClient, place: Place
) -> None:
    tune(client, "first", seed=1)
    for _ in range(2):
        rows, logprobs = sampled(servers.captured, "first")
        batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
        trained = list(client.forward("first", batch, model="policy").logprobs)
        place.check(Agreement.of(trained, logprobs))
        client.forward_backward("first", batch)
        client.optim_step("first", 0.02)
        client.publish("first", "first")  # the next round is answered by this version
    client.close_session("first")


def test_two_adapters_and_the_base_are_mixed_in_one_batch(
    servers: Servers, client: ResidentClient, place: Place
) -> None:
    for name, seed in (("one", 2), ("two", 3)):
        tune(client, name, seed)
    owners = ["one", None, "two", "one", "two", None]
    prompts = np.random.default_rng(5).integers(3, 700, (len(owners), 16)).tolist()
    body = {
        "input_ids": prompts,
        "lora_path": owners,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True},
        "return_logprob": True,
    }
    answers = servers.captured.post("/generate", body)
    for owner in ("one", "two"):
        chosen = [place_of for place_of, name in enumerate(owners) if name == owner]
        rows = [prompts[index] + answers[index]["output_ids"] for index in chosen]
        served = np.array(
            [[item[0] for item in answers[index]["meta_info"]["output_token_logprobs"]] for index in chosen]
        )
        batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
        place.check(Agreement.of(list(client.forward(owner, batch, model="policy").logprobs), served))
        client.close_session(owner)
