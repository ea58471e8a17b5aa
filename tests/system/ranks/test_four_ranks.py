"""Four ranks against one, a whole session: answers, training steps, a checkpoint, the version that is published and its
answers; and versions that are published on two ranks while clients use their name."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from reference import lora
from reference.ranks.sessions import STEPS, answers_of, trained
from reference.server.greedy import Answer, ask

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings
from kt_runtime.wire.replies import STEP_RUNNING

SECONDS = 300.0
PROMPT = list(range(3, 60))
NUM_CLIENTS, NUM_VERSIONS = 4, 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads four ranks can share, and an adapter on all its modules."""
    directory = tmp_path_factory.mktemp("four")
    preset = load_preset("tiny-qwen3-moe")
    preset = msgspec.structs.replace(preset, config={**preset.config, "num_key_value_heads": 4})
    make_model(preset, directory / "model", seed=6)
    lora.write_adapter(directory / "given", lora.random_adapter(preset.config, rank=6, alpha=12.0, seed=2))
    return directory


@contextlib.contextmanager
def running(directory: Path, ranks: int, *options: str) -> Iterator[ServerAPI]:
    arguments = ["--tp-size", str(ranks), "--expert-threads", "1", "--max-lora-rank", "8", "--exact"]
    place = ["--adapter-dir", str(directory / f"{ranks}-adapters"), "--", "--chunked-prefill-size", "64"]
    with server(str(directory / "model"), [*arguments, *options, *place], directory / f"{ranks}.log") as api:
        yield api


def test_four_ranks_have_the_bits_of_one(directory: Path) -> None:
    with running(directory, 1) as api:
        answers, session = answers_of(api, directory), trained(api, directory, "one")
    assert len({session[f"loss {step}"] for step in range(STEPS)}) == STEPS
    with running(directory, 4) as api:
        assert answers_of(api, directory) == answers
        for name, value in trained(api, directory, "four").items():
            assert value == session[name], name
        status = api.get("/kt/status")
    assert (status["step"], status["step_exceptions"]) == (STEP_RUNNING, [])
    assert [(rank["first_expert"], rank["num_experts"]) for rank in status["ranks"]] == [(0, 2), (2, 2), (4, 2), (6, 2)]


def test_each_answer_is_one_versions_while_versions_are_published_on_two_ranks(directory: Path) -> None:
    """Clients ask by the name without a pause; the base's answers beside them do not change."""
    given: list[Answer] = []
    ended = threading.Event()

    def use_the_name(api: ServerAPI) -> None:
        while not ended.is_set():
            given.append(ask(api, PROMPT, "live"))

    batch = Batch.from_sequences([PROMPT[:-1]], [PROMPT[1:]])
    with running(directory, 2) as api, resident_client(api) as client:
        base = ask(api, PROMPT)
        client.create_session("live", LoraSettings(rank=4, alpha=8.0, targets=["all"], seed=5))
        versions: list[Answer] = []
        with ThreadPoolExecutor(NUM_CLIENTS) as pool, contextlib.ExitStack() as failing:
            failing.callback(ended.set)  # the pool waits for its clients
            clients = []
            for version in range(NUM_VERSIONS):
                client.forward_backward("live", batch)
                client.optim_step("live", 0.05)
                client.publish("live", "live")
                versions.append(ask(api, PROMPT, "live"))
                tokens, served = versions[-1]
                whole = [*PROMPT, *tokens]
                trains = client.forward("live", Batch.from_sequences([whole[:-1]], [whole[1:]])).logprobs[0]
                assert trains.tolist() == served  # every rank serves this step
                assert ask(api, PROMPT) == base
                if version == 0:
                    clients = [pool.submit(use_the_name, api) for _ in range(NUM_CLIENTS)]
                seen = len(given)
                while len(given) < seen + 2 * NUM_CLIENTS and not any(each.done() for each in clients):
                    ended.wait(0.01)
            ended.set()
            for each in clients:
                each.result(SECONDS)
    assert len({tuple(logprobs) for _, logprobs in versions}) == NUM_VERSIONS
    assert all(answer in versions for answer in given)
    assert {versions.index(answer) for answer in given} == set(range(NUM_VERSIONS))
