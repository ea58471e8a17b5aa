"""A real server with the native step and with `--no-step`: the same greedy tokens and the same logprobs, bit by bit, of
the base and of adapters, whatever batches they are in."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from reference.server.greedy import Answer, ask
from system.conftest import Served

from kt_runtime.cli.connection import resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.errors import RuntimeFault
from kt_runtime.families import family_for
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings

LENGTHS = (1, 2, 7, 33, 150, 400)  # in chunks of 64 tokens and pages of 8
ADAPTERS = {"tuned": LoraSettings(rank=4, alpha=8, seed=5), "other": LoraSettings(rank=7, alpha=3, seed=6)}


class Answers(NamedTuple):
    """`state`: what /kt/status says of the step and of exactness. `given`, `adapted`: answers of the base and of the
    adapters."""

    state: tuple[str, list[str], str]
    given: list[Answer]
    adapted: list[Answer]


def has_states(directory: Path) -> bool:
    config = json.loads((directory / "model" / "config.json").read_text())
    return family_for(config).keeps_states


def answers_of(directory: Path, name: str, *options: str) -> Answers:
    """A server's answers to prompts alone, together, with cached prefixes, while adapters are published, and beside
    the adapters' requests."""
    arguments = ["--adapter-dir", str(directory / name), *options]
    pages = [] if has_states(directory) else ["--page-size", "8"]
    passed_on = ["--", "--chunked-prefill-size", "64", *pages]
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 700, (length,), generator=g).tolist() for length in LENGTHS]
    with (
        server(str(directory / "model"), [*arguments, *passed_on], directory / f"{name}.log") as api,
        resident_client(api) as client,
        ThreadPoolExecutor((1 + len(ADAPTERS)) * len(prompts)) as pool,
    ):
        given = [ask(api, prompt) for prompt in prompts]
        for adapter, settings in ADAPTERS.items():
            client.create_session(adapter, settings)
            client.forward_backward(adapter, Batch.from_sequences([prompts[3][:-1]], [prompts[3][1:]]))
            client.optim_step(adapter, 0.01)
        streams = [pool.submit(ask, api, [5, *prompt]) for prompt in prompts]
        for adapter in ADAPTERS:
            client.publish(adapter, adapter)
            client.close_session(adapter)
        given += [stream.result() for stream in streams]
        beside = [pool.submit(ask, api, prompt, adapter) for prompt in prompts for adapter in ADAPTERS]
        streams = [pool.submit(ask, api, [6, *prompt]) for prompt in prompts]
        given += [stream.result() for stream in streams]
        adapted = [stream.result() for stream in beside]
        given.append(ask(api, prompts[-1][:300] + prompts[-2]))
        status = client.status()
        assert status.exact == (not status.not_exact)
        return Answers((status.step, status.step_exceptions, status.not_exact), given, adapted)


@pytest.fixture(scope="module", params=["tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-qwen3-5-moe-text"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("step")
    make_model(request.param, directory / "model", seed=6)
    return directory


@pytest.mark.parametrize("options", [("--dtype", "bfloat16"), ("--dtype", "float32", "--expert-format", "int4")])
def test_answers_have_the_same_bits_with_and_without_the_step(directory: Path, options: tuple[str, ...]) -> None:
    with_step, without = (
        answers_of(directory, "with", "--exact", *options),
        answers_of(directory, "without", "--no-step", *options),
    )
    assert with_step.state == ("running", [], "")
    assert without.state == ("--no-step", [], "the native step does not compute the model: --no-step")
    assert with_step.given == without.given
    assert with_step.adapted == without.adapted
    assert with_step.adapted[::2] != with_step.adapted[1::2]
    assert "not the native step" not in (directory / "with.log").read_text()


def test_a_server_that_is_not_exact_ends_with_status_2_and_says_why(directory: Path) -> None:
    """Keys and values rounded to fp8, which training does not round."""
    options = ["--adapter-dir", str(directory / "fp8"), "--exact", "--", "--kv-cache-dtype", "fp8_e4m3"]
    with (
        pytest.raises(RuntimeFault, match="ended with status 2") as refused,
        server(str(directory / "model"), options, directory / "fp8.log"),
    ):
        pass
    said = (
        "--exact: training's log-probabilities may differ from served ones: the native step does not compute the model"
    )
    assert f"{said}: the KV pool is a " in str(refused.value)


def test_the_status_and_the_log_say_that_the_step_runs(float32_server: Served) -> None:
    assert float32_server.api.get("/kt/status")["step"] == "running"
    log = float32_server.log.read_text(errors="replace")
    assert log.count("the native step computes the decoder stack") == 1
