"""A real server of two ranks trains with the bits of one: losses, log-probabilities, norms, the published version and
its answers, the files of a checkpoint; and either continues from the other's checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.server.greedy import ask

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.errors import InvalidValueError, NotFoundError
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings, PreferenceLoss

STEPS = 10
PROMPT = [5, *range(40, 73)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    make_model("tiny-qwen3-moe", directory / "model", seed=6)
    return directory


@contextlib.contextmanager
def running(directory: Path, name: str, *options: str) -> Iterator[ServerAPI]:
    arguments = ["--expert-threads", "1", "--max-lora-rank", "8", "--adapter-dir", str(directory / f"{name}-adapters")]
    with server(str(directory / "model"), [*arguments, *options], directory / f"{name}.log") as api:
        yield api


def batch(seed: int, *lengths: int) -> Batch:
    random = np.random.default_rng(seed)
    rows = [random.integers(3, 700, length + 1).tolist() for length in lengths]
    return Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])


def trained(api: ServerAPI, directory: Path, name: str) -> dict[str, Any]:
    """Two sessions whose calls are in flight together; what the client sees, and the files."""
    found: dict[str, Any] = {}
    with resident_client(api) as client:
        client.create_session("all", LoraSettings(rank=4, alpha=8.0, targets=["all"], seed=5))
        client.create_session("attention", LoraSettings(rank=3, alpha=8.0, targets=["attention"], dropout=0.1, seed=6))
        for step in range(STEPS):
            sent = batch(step % 3, 60, 33, 7, 1)
            tickets = [client.begin_forward_backward(session, sent) for session in ("all", "attention")]
            results = [client.finish_forward(ticket, sent) for ticket in tickets]
            found[f"losses {step}"] = [each.loss for each in results]
            found[f"norms {step}"] = [
                client.optim_step(session, 0.01, weight_decay=0.01, max_grad_norm=0.5 * (step % 2)).grad_norm
                for session in ("all", "attention")
            ]
        found |= after_training(client, directory, name)
        versions = {each: client.publish(each, each).version for each in ("all", "attention")}
        found |= {"versions": versions, "answers": {each: ask(api, PROMPT, each) for each in (None, *versions)}}
        assert_training_computes_what_is_served(api, client)
        refused(client, directory)
        client.close_session("attention")
        found["after another has closed"] = client.forward("all", batch(9, 20)).loss
    return found


def after_training(client: ResidentClient, directory: Path, name: str) -> dict[str, Any]:
    client.save("all", str(directory / name))
    pairs = batch(7, 20, 20, 9, 9)
    preference = client.forward_backward("all", pairs, PreferenceLoss(kind="orpo", beta=0.2))
    logprobs = client.forward("all", batch(8, 30, 5)).logprobs
    base = client.forward("all", batch(8, 30, 5), model="base").logprobs
    return {
        "content": (directory / name / "adapter_model.safetensors").read_bytes(),
        "optimizer": (directory / name / "optimizer.safetensors").read_bytes(),
        "preference": (preference.loss, preference.metrics),
        "logprobs": [[each.tolist() for each in some] for some in (logprobs, base)],
    }


def assert_training_computes_what_is_served(api: ServerAPI, client: ResidentClient) -> None:
    tokens, served = ask(api, PROMPT, "all")
    whole = PROMPT + tokens
    assert client.forward("all", Batch.from_sequences([whole[:-1]], [whole[1:]])).logprobs[0].tolist() == served


def refused(client: ResidentClient, directory: Path) -> None:
    """Errors are a session's own; ranks go on together."""
    with pytest.raises(NotFoundError, match="absent"):
        client.load("all", str(directory / "absent"))
    with pytest.raises(InvalidValueError, match="vocabulary"):
        client.forward("all", Batch.from_sequences([[3, 99_999]], [[99_999, 4]]))


def continued(api: ServerAPI, path: Path) -> list[float]:
    """Losses and norms after a session of the checkpoint has been loaded."""
    with resident_client(api) as client:
        client.create_session("again", LoraSettings(rank=4, alpha=8.0, targets=["all"], seed=1))
        assert client.load("again", str(path)).step == STEPS
        numbers = []
        for step in range(2):
            numbers.append(client.forward_backward("again", batch(20 + step, 30, 11)).loss)
            numbers.append(client.optim_step("again", 0.01).grad_norm)
        client.close_session("again")
    return numbers


@pytest.mark.parametrize(("dtype", "expert_format"), [("bfloat16", None), ("float32", None), ("bfloat16", "int8")])
def test_two_ranks_train_with_the_bits_of_one(directory: Path, dtype: str, expert_format: str | None) -> None:
    options = ["--dtype", dtype, *(("--expert-format", expert_format) if expert_format else ())]
    one, two = (f"{number}-{dtype}-{expert_format}" for number in ("one", "two"))
    with (
        running(directory, one, *options) as of_one,
        running(directory, two, "--tp-size", "2", "--exact", *options) as of_two,
    ):
        expected, found = trained(of_one, directory, one), trained(of_two, directory, two)
        for name, value in expected.items():
            assert found[name] == value, name
        further = [continued(api, directory / of) for api in (of_one, of_two) for of in (one, two)]
    assert further == 4 * further[:1]
    assert len({loss for step in range(STEPS) for loss in expected[f"losses {step}"]}) > STEPS
