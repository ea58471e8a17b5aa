"""Sixty-four streams while adapters are published, replaced, rolled back, evicted and unloaded, and trainers are killed
in each call of the protocol: none fails, and each answer is of one version that its name had meanwhile. And streams of
two adapters, which never both pause: a request for a third one is answered all the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from reference import lora
from reference.cases import choose
from reference.server import doomed_trainer

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings

NUM_STREAMS = 64
NEW_TOKENS = 16
RANK, MEMORY = 64, "10MiB"  # two adapters of rank 64 in float32, of 4 MiB each
KEPT = tuple(f"kept-{number}" for number in range(4))
MOVING, TRAINED = "moving", "trained"
"""Loaded again and again from one of two directories, and rolled back; published by a session after each step."""
NAMES: tuple[str | None, ...] = (None, *KEPT, MOVING, TRAINED, TRAINED)
DEATHS = choose(few=doomed_trainer.CALLS[:1], usual=doomed_trainer.CALLS[2:5], every=doomed_trainer.CALLS)
SECONDS = 600.0
MOST_OVERTAKING = 12
"""Answers of each stream whose adapter is in a slot, while a request for another adapter waits. Measured: 2.4."""


@dataclass(frozen=True)
class Asked:
    """One stream's question: always the same."""

    number: int
    adapter: str | None
    new_tokens: int = NEW_TOKENS

    @property
    def body(self) -> dict[str, Any]:
        return {
            "input_ids": [50 + 9 * self.number + step for step in range(8)],
            "sampling_params": {"temperature": 0, "max_new_tokens": self.new_tokens, "ignore_eos": True},
            "lora_path": self.adapter,
        }


ASKED = tuple(Asked(number, NAMES[number % len(NAMES)]) for number in range(NUM_STREAMS))


@dataclass
class Load:
    """Streams, each of which asks again as soon as it is answered, in a thread with an event loop of its own.

    `answers`: what each question was answered; `failures`: how streams ended otherwise. `num_answers` only grows.
    """

    url: str
    streams: Sequence[Asked] = ASKED
    answers: dict[Asked, set[tuple[int, ...]]] = field(init=False)
    failures: list[str] = field(default_factory=list)
    num_answers: int = 0

    def __post_init__(self) -> None:
        self.answers = {asked: set() for asked in self.streams}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def wait_for(self, more: int) -> None:
        """Until so many more answers have come: of streams that ran while something else happened."""
        wanted, deadline = self.num_answers + more, time.monotonic() + SECONDS
        while self.num_answers < wanted and self._thread.is_alive():
            assert time.monotonic() < deadline, "the streams stand still"
            time.sleep(0.05)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=NUM_STREAMS)
        async with httpx.AsyncClient(base_url=self.url, timeout=SECONDS, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(self._ask(client, asked) for asked in self.streams))

    async def _ask(self, client: httpx.AsyncClient, asked: Asked) -> None:
        while not self._ending.is_set():
            try:
                self.answers[asked].add(await read(client, asked))
                self.num_answers += 1
            except (httpx.HTTPError, RuntimeError) as error:
                self.failures.append(f"{asked.adapter}: {error!r}")


async def read(client: httpx.AsyncClient, asked: Asked) -> tuple[int, ...]:
    """The tokens of one stream. Raises RuntimeError for an error in it, or an end that is none."""
    tokens: list[int] = []
    async with client.stream("POST", "/generate", json={**asked.body, "stream": True}) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}: {(await answer.aread())[:500]!r}")
        last = ""
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                tokens = event["output_ids"]
            last = line or last
    if last != "data: [DONE]" or len(tokens) != asked.new_tokens:
        raise RuntimeError(f"{len(tokens)} tokens, and at the end {last!r}")
    return tuple(tokens)


def answers(api: ServerAPI, name: str | None) -> dict[Asked, tuple[int, ...]]:
    """What the streams of `name` are to be answered with its present version, asked in one request."""
    questions = [asked for asked in ASKED if asked.adapter == name]
    body = {
        "input_ids": [asked.body["input_ids"] for asked in questions],
        "sampling_params": questions[0].body["sampling_params"],
        "lora_path": [name] * len(questions),
    }
    found = api.post("/generate", body)
    return {asked: tuple(answer["output_ids"]) for asked, answer in zip(questions, found, strict=True)}


def batch(seed: int) -> Batch:
    rows = np.random.default_rng(seed).integers(3, 700, (4, 33)).tolist()
    return Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model, the server's log and the adapters' directories."""
    return tmp_path_factory.mktemp("sixty-four")


@pytest.fixture(scope="module")
def api(place: Path) -> Iterator[ServerAPI]:
    make_model("tiny-qwen3-moe", place / "model", seed=3)
    options = ["--dtype", "float32", "--max-lora-rank", str(RANK), "--lora-memory", MEMORY]
    options += ["--max-running-requests", str(NUM_STREAMS), "--max-total-tokens", "8192"]
    options += ["--adapter-dir", str(place / "adapters")]
    with server(str(place / "model"), options, place / "server.log") as started:
        yield started


@pytest.fixture(scope="module")
def sources(place: Path, api: ServerAPI) -> list[Path]:
    """Directories of the kept adapters, and two of the moving one."""
    config = json.loads((place / "model" / "config.json").read_text(encoding="utf-8"))
    adapters = [lora.random_adapter(config, rank=RANK, alpha=64.0, seed=seed) for seed in range(len(KEPT) + 2)]
    return [lora.write_adapter(place / f"source-{seed}", adapter) for seed, adapter in enumerate(adapters)]


def load(api: ServerAPI, name: str, source: Path) -> None:
    api.post("/kt/adapters", {"name": name, "path": str(source)})


class Trainer:
    """A session that publishes TRAINED after each of its steps, and what each of its versions answers."""

    def __init__(self, api: ServerAPI, client: ResidentClient) -> None:
        self._api, self._client, self._steps = api, client, 0
        self.versions: list[dict[Asked, tuple[int, ...]]] = []
        client.create_session(TRAINED, LoraSettings(rank=8, alpha=16.0, seed=1), publishes=TRAINED)

    def publish(self) -> None:
        self._steps += 1
        self._client.forward_backward(TRAINED, batch(self._steps))
        self._client.optim_step(TRAINED, 0.02)
        self._client.publish(TRAINED, TRAINED)
        self.versions.append(answers(self._api, TRAINED))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.05)


def let_a_trainer_die(
    doomed: doomed_trainer.DoomedTrainer, call: str, client: ResidentClient, api: ServerAPI, place: Path
) -> None:
    """In this call. Nothing of it stays behind."""
    client.create_session(doomed_trainer.SESSION, LoraSettings(rank=RANK, alpha=64.0, seed=1))
    doomed.killed_in(call, client.address, place / ("doomed" if call == "save" else "source-0"))
    left = {doomed_trainer.SESSION} if call != "close_session" else set()
    left |= {doomed_trainer.CREATED} if call == "create_session" else set()
    until(lambda: {info.session for info in client.status(wait_s=0).sessions} == {TRAINED, *left})
    for session in left:
        client.close_session(session)
    if (name := {"publish": doomed_trainer.PUBLISHED, "load_adapter": doomed_trainer.LOADED}.get(call)) is not None:
        until(lambda: name in [adapter["name"] for adapter in api.get("/kt/adapters")["adapters"]])
        api.delete(f"/kt/adapters/{name}")


def test_none_of_sixty_four_streams_fails_whatever_happens_to_adapters_and_trainers(
    api: ServerAPI, place: Path, sources: list[Path]
) -> None:
    *kept, first, second = sources
    for name, source in zip(KEPT, kept, strict=True):
        load(api, name, source)
    expected: dict[str | None, list[dict[Asked, tuple[int, ...]]]] = {
        name: [answers(api, name)] for name in (None, *KEPT)
    }
    expected[MOVING] = []
    for source in (first, second):
        load(api, MOVING, source)
        expected[MOVING].append(answers(api, MOVING))
    with resident_client(api, timeout_s=SECONDS) as client, contextlib.ExitStack() as held:
        trainers = [held.enter_context(doomed_trainer.DoomedTrainer()) for _ in DEATHS]
        trainer = Trainer(api, client)
        trainer.publish()
        with Load(api.url) as streams:
            streams.wait_for(NUM_STREAMS)
            for call, doomed in zip(DEATHS, trainers, strict=True):
                let_a_trainer_die(doomed, call, client, api, place)
                trainer.publish()
                load(api, MOVING, first)
                api.post(f"/kt/adapters/{MOVING}/rollback", {"version": None})
                load(api, "leaving", kept[0])
                api.delete("/kt/adapters/leaving")
                streams.wait_for(NUM_STREAMS)
    expected[TRAINED] = trainer.versions
    came_back = (place / "server.log").read_text(errors="replace").count("of a batch again")
    seen = [len(streams.answers[asked]) for asked in ASKED if asked.adapter == TRAINED]
    print(
        f"{streams.num_answers} answers to {NUM_STREAMS} streams, {len(streams.failures)} failures; {len(DEATHS)} "
        f"trainers killed; {len(trainer.versions)} versions, of which streams saw {min(seen)} to {max(seen)}; "
        f"adapters came back {came_back} times"
    )
    assert streams.failures == []
    assert wrong(streams.answers, expected) == []
    assert max(seen) > 1 and came_back > 0


def test_a_request_for_another_adapter_is_not_overtaken_without_end(api: ServerAPI, sources: list[Path]) -> None:
    """Two adapters have streams at all times, and a third one does not fit beside them."""
    for name, source in zip(KEPT, sources, strict=False):
        load(api, name, source)
    expected = answers(api, KEPT[2])
    # Answers of different lengths never end all at once.
    streams = [Asked(number, KEPT[number % 2], 11 + 2 * number) for number in range(16)]
    with Load(api.url, streams) as busy:
        busy.wait_for(4 * len(streams))
        before, asked = busy.num_answers, threading.Thread(target=lambda: found.append(answers(api, KEPT[2])))
        found: list[dict[Asked, tuple[int, ...]]] = []
        asked.start()
        while asked.is_alive() and busy.num_answers < before + MOST_OVERTAKING * len(streams):
            asked.join(0.05)
        overtaken_by = busy.num_answers - before
    asked.join()
    print(f"{overtaken_by / len(streams):.1f} answers of each other stream")
    assert busy.failures == [] and found == [expected]
    assert overtaken_by < MOST_OVERTAKING * len(streams)


def wrong(
    given_to: Mapping[Asked, set[tuple[int, ...]]],
    expected: Mapping[str | None, Sequence[Mapping[Asked, tuple[int, ...]]]],
) -> list[str]:
    """The streams with an answer that none of their name's versions gives."""
    return [
        f"stream {asked.number} of {asked.adapter}: {sorted(given)}"
        for asked, given in given_to.items()
        if not given or not given <= {version[asked] for version in expected[asked.adapter]}
    ]
