"""What the prefix cache's tiers give back is what was computed: greedy answers from each tier alone.

From the device, the host and the disk come the bits that were computed. So log-probabilities of all answers are equal
to those without a cached prefix, and to training's.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from reference import lora
from reference.place import Place
from system.forked_server import frontend_of

from kt_runtime.cache import inspection
from kt_runtime.cli.connection import resident_client
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings, Model

PRESETS = ("tiny-deepseek-v3", "tiny-qwen3-moe", "tiny-deepseek-v32")  # latent, grouped-query, latent with an indexer
PROMPT_TOKENS = 200
CACHED_TOKENS = 192  # whole pages of 16; the last token is always computed
TIERS = ("device", "host", "disk", "disk after eviction", "disk after restart")
ADAPTERS = (None, "one")
MODELS: tuple[Model, ...] = ("base", "reference")  # in training, in the same order
IDLE_SECONDS = 3.0
WRITING_SECONDS = 60.0
END_SECONDS = 60.0


def prompt(seed: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    return np.random.default_rng(seed).integers(3, 700, num_tokens).tolist()


def adapter_directory(place: Path, seed: int) -> Path:
    config = json.loads((place / "model" / "config.json").read_text(encoding="utf-8"))
    return lora.write_adapter(place / f"source-{seed}", lora.random_adapter(config, rank=8, alpha=12.0, seed=seed))


@dataclass(frozen=True)
class Story:
    """`answers`: by (what served, adapter); "cold" is the first. `last`: of a prompt that was asked right before the
    server ended, cold and after the restart. `idle_share`: of a core, taken by a scheduler with nothing to do.

    `trained`: answers of an adapter that was trained here, cold, again, and after another step of training.
    `in_training`: log-probabilities of the cold answer's tokens by adapter, of `trained`'s under "trained"."""

    answers: dict[tuple[str, str | None], Any]
    last: tuple[Any, Any]
    idle_share: float
    records_written_unasked: int
    trained: tuple[Any, Any, Any]
    in_training: dict[str | None, list[list[float]]]


@pytest.fixture(scope="module", params=PRESETS)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cached_server: Any) -> Story:
    """One server, and it again after a restart: starting servers is most of the time that this takes."""
    place = tmp_path_factory.mktemp("cached")
    with cached_server(request.param, place) as served:
        served.api.post("/kt/adapters", {"name": "one", "path": str(adapter_directory(place, 1))})
        answers = {key: answer for name in ADAPTERS for key, answer in _answers(served, name)}
        idle_share, records = _idle(served)
        in_training = _in_training(served, [answers["cold", name].tokens for name in ADAPTERS])
        trained, in_training["trained"] = _train(served)
        last = served.ask(prompt(9))
        _interrupt(served)
    with cached_server(request.param, place) as served:
        last_again = served.ask(prompt(9))
        for name in ADAPTERS:
            if name is not None:  # under its content it is found, not under its name
                served.api.post("/kt/adapters", {"name": "another", "path": str(place / "source-1")})
            answers["disk after restart", name] = served.ask(prompt(1), name and "another")
    return Story(answers, (last, last_again), idle_share, records, trained, in_training)


def _answers(served: Any, adapter: str | None) -> Iterator[tuple[tuple[str, str | None], Any]]:
    yield ("cold", adapter), served.ask(prompt(1), adapter)
    yield ("device", adapter), served.ask(prompt(1), adapter)
    served.flush_device()
    yield ("host", adapter), served.ask(prompt(1), adapter)
    served.flush_memory()
    yield ("disk", adapter), served.ask(prompt(1), adapter)
    served.evict_from_memory()
    yield ("disk after eviction", adapter), served.ask(prompt(1), adapter)


def _idle(served: Any) -> tuple[float, int]:
    """With pages on their way to the disk and no request that would give the scheduler a turn."""
    served.flush_memory()
    before = inspection.statistics(served.cache_directory).records
    served.ask(prompt(2))
    deadline = time.monotonic() + WRITING_SECONDS
    written = 0
    while written < CACHED_TOKENS // 16 and time.monotonic() < deadline:
        time.sleep(0.1)
        written = inspection.statistics(served.cache_directory).records - before
    time.sleep(1.0)
    scheduler = next(
        child for child in frontend_of(served.model_directory).children() if "scheduler" in " ".join(child.cmdline())
    )
    start = scheduler.cpu_times()
    time.sleep(IDLE_SECONDS)
    end = scheduler.cpu_times()
    return (end.user + end.system - start.user - start.system) / IDLE_SECONDS, written


def _interrupt(served: Any) -> None:
    """As Ctrl-C in a terminal does, which all of the server's processes get. Waits for the end."""
    process = frontend_of(served.model_directory)
    os.killpg(process.pid, signal.SIGINT)
    deadline = time.monotonic() + END_SECONDS
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _in_training(served: Any, answers: list[list[int]]) -> dict[str | None, list[list[float]]]:
    """Of the base's and the adapter's answer to `prompt(1)`."""
    with resident_client(served.api) as client:
        source = str(served.place / "source-1")
        session = client.create_session("reads", LoraSettings(rank=1, alpha=1.0, seed=1), reference=source).session
        found = [_logprobs(client, session, answer, of) for answer, of in zip(answers, MODELS, strict=True)]
        client.close_session(session)
    return {adapter: [logprobs] for adapter, logprobs in zip(ADAPTERS, found, strict=True)}


def _logprobs(client: ResidentClient, session: str, answer: list[int], model: Model = "policy") -> list[float]:
    """What training computes for the tokens of an answer to `prompt(1)`."""
    row = [*prompt(1), *answer]
    found = client.forward(session, Batch.from_sequences([row[:-1]], [row[1:]]), model=model).logprobs[0]
    return [float(value) for value in found[-len(answer) :]]


def _train(served: Any) -> tuple[tuple[Any, Any, Any], list[list[float]]]:
    """Answers to `prompt(1)` as `Story.trained`, and their log-probabilities in training."""
    tokens = np.random.default_rng(5).integers(3, 700, (4, 33)).tolist()
    batch = Batch.from_sequences([row[:-1] for row in tokens], [row[1:] for row in tokens])
    with resident_client(served.api) as client:
        session = client.create_session("cached", LoraSettings(rank=4, alpha=8.0, seed=1)).session
        answers, in_training = [], []
        for _ in range(2):
            client.forward_backward(session, batch)
            client.optim_step(session, 0.02)
            client.publish(session, "trained")
            for _ in range(2):
                answers.append(served.ask(prompt(1), "trained"))
                in_training.append(_logprobs(client, session, answers[-1].tokens))
        client.close_session(session)
    return (answers[0], answers[1], answers[2]), in_training[:3]


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("tier", TIERS)
def test_a_prefix_from_each_tier_answers_as_a_computed_one(
    story: Story, tier: str, adapter: str | None, place: Place
) -> None:
    cold, found = (story.answers[served, adapter] for served in ("cold", tier))
    assert cold.tiers == {"device": 0, "host": 0, "disk": 0, "computed": PROMPT_TOKENS}
    expected = {"device": 0, "host": 0, "disk": 0, "computed": PROMPT_TOKENS - CACHED_TOKENS}
    assert found.tiers == {**expected, tier.split()[0]: CACHED_TOKENS}
    assert found.tokens == cold.tokens
    place.check_same(found.logprobs, cold.logprobs)
    place.check_same([found.logprobs], story.in_training[adapter])


def test_an_adapter_answers_otherwise_than_the_base(story: Story) -> None:
    assert story.answers["cold", None].tokens != story.answers["cold", "one"].tokens


def test_what_was_computed_right_before_ctrl_c_is_on_the_disk(story: Story, place: Place) -> None:
    cold, again = story.last
    assert cold.tiers["computed"] == PROMPT_TOKENS
    assert again.tiers["disk"] == CACHED_TOKENS
    assert again.tokens == cold.tokens
    place.check_same(again.logprobs, cold.logprobs)


def test_pages_reach_the_disk_without_another_request_and_then_the_scheduler_sleeps(story: Story) -> None:
    print(f"{story.records_written_unasked} pages written, {100 * story.idle_share:.1f} % of a core taken afterwards")
    assert story.records_written_unasked >= CACHED_TOKENS // 16
    assert (
        story.idle_share < 0.3
    )  # a spinning core is 1; a tiny model's process takes some 0.03, more on a busy machine


def test_training_continues_and_no_version_is_given_anothers_pages(story: Story, place: Place) -> None:
    first, again, second = story.trained
    assert first.tiers["computed"] == PROMPT_TOKENS
    assert again.tiers["device"] == CACHED_TOKENS
    assert again.tokens == first.tokens
    assert second.tiers["computed"] == PROMPT_TOKENS
    place.check_same([answer.logprobs for answer in story.trained], story.in_training["trained"])
    assert first.logprobs != second.logprobs


def test_many_requests_at_once_through_small_tiers_answer_as_alone(
    tmp_path: Path, cached_server: Any, place: Place
) -> None:
    """Pages are evicted, written down, loaded back and read ahead all at the same time."""
    prompts = [prompt(50 + number % 6, 96) + prompt(90 + number, 20 + number) for number in range(24)]
    with cached_server(PRESETS[1], tmp_path, device_tokens=512, host_tokens=768, dtype="float32") as served:
        with ThreadPoolExecutor(6) as pool:
            together = [list(pool.map(served.ask, prompts)) for _ in range(3)]
        again = [served.ask(prompts[0]) for _ in range(2)]  # six at once can be too many for the device tier
        served.api.post("/kt/cache/clear", {})
        alone = [served.ask(each) for each in prompts]
    answers = [*chain.from_iterable(together), *again]
    used = {tier for answer in answers for tier, count in answer.tiers.items() if count}
    assert used >= {"device", "host", "disk", "computed"}
    for found, expected in zip(answers, [*alone * len(together), *alone[:1] * len(again)], strict=True):
        assert found.tokens == expected.tokens
        place.check_same(found.logprobs, expected.logprobs)
