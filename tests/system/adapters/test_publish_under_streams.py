"""Training, publishing and rolling back on a real server while streams are being answered (float32, greedy)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import pytest
from reference.place import Place

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings

NUM_STREAMS = 16
NEW_TOKENS = 48
# Pieces of answers that arrive while four training calls of LONG_BATCH sequences run: 1,118 to 1,669 measured with
# native kernels on two cores with AVX-512. Calls that kept the scheduler for themselves would let through one piece of
# each stream at their begin and one at their end, 128 in all.
LONG_BATCH = 64
FEWEST_PIECES = 256
PROMPTS = [[100 + 7 * index + step for step in range(12 + index)] for index in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[ServerAPI]:
    directory = tmp_path_factory.mktemp("server")
    make_model("tiny-deepseek-v3", directory / "model", seed=3)
    options = ["--dtype", "float32", "--adapter-dir", str(directory / "adapters"), "--max-lora-rank", "8"]
    with server(str(directory / "model"), place.arguments(options), directory / "server.log") as started:
        yield started


@pytest.fixture
def client(api: ServerAPI) -> Iterator[ResidentClient]:
    with resident_client(api) as opened:
        yield opened


def generate(api: ServerAPI, prompt: list[int], adapter: str | None, tokens: int = NEW_TOKENS) -> dict:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "lora_path": adapter,
    }
    return api.post("/generate", body)


def flush_cache(api: ServerAPI) -> None:
    httpx.post(f"{api.url}/flush_cache", params={"timeout": 30}, timeout=60, trust_env=False).raise_for_status()


def answers(api: ServerAPI, adapter: str | None) -> list[list[int]]:
    return [generate(api, prompt, adapter)["output_ids"] for prompt in PROMPTS]


def train_step(client: ResidentClient, session: str, seed: int, *, sequences: int = 4) -> tuple[float, float]:
    """CLOCK_MONOTONIC before and after the gradient was computed."""
    tokens = np.random.default_rng(seed).integers(3, 700, (sequences, 33)).tolist()
    batch = Batch.from_sequences([row[:-1] for row in tokens], [row[1:] for row in tokens])
    began = time.monotonic()
    client.forward_backward(session, batch)
    ended = time.monotonic()
    client.optim_step(session, 0.02)
    return began, ended


@dataclass
class Stream:
    """One /generate stream: its tokens, when each piece arrived (CLOCK_MONOTONIC), what went wrong."""

    api: ServerAPI
    prompt: list[int]
    adapter: str
    num_tokens: int = NEW_TOKENS
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None
    has_begun: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        body = {
            "input_ids": self.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": self.num_tokens, "ignore_eos": True},
            "lora_path": self.adapter,
            "stream": True,
        }
        try:
            with httpx.stream("POST", f"{self.api.url}/generate", json=body, timeout=120, trust_env=False) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    self.times.append(time.monotonic())
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(event["error"])
                    self.tokens = event["output_ids"]
                    self.has_begun.set()
        except (httpx.HTTPError, RuntimeError) as error:
            self.error = repr(error)


class KeepAsking:
    """Clients that each ask `adapter` one thing, again and again, and begin one more stream after `finish`."""

    def __init__(
        self, api: ServerAPI, adapter: str, prompts: Sequence[list[int]] = PROMPTS, num_tokens: int = NEW_TOKENS
    ) -> None:
        self.streams = [Stream(api, prompt, adapter, num_tokens) for prompt in prompts]
        self._finish = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(stream,)) for stream in list(self.streams)]
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[Stream]:
        self._finish.set()
        for thread in self._threads:
            thread.join()
        return self.streams

    def _ask(self, stream: Stream) -> None:
        stream.run()
        is_last = False
        while not is_last:
            is_last = self._finish.is_set()
            stream = Stream(stream.api, stream.prompt, stream.adapter, stream.num_tokens)
            self.streams.append(stream)
            stream.run()


def longest_stall_ms(streams: list[Stream]) -> float:
    return 1000 * max(after - before for stream in streams for before, after in pairwise(stream.times))


def test_publishing_under_sixteen_streams(api: ServerAPI, client: ResidentClient) -> None:
    """None fails, none waits for the end of a training call, each is of exactly one version, and both are seen."""
    fingerprint = api.get("/kt/status?verify=true")["fingerprint"]
    client.create_session("streams", LoraSettings(rank=8, alpha=16, seed=1))
    train_step(client, "streams", seed=1)
    first = client.publish("streams", "moving")
    of_first = answers(api, "moving")

    calm = KeepAsking(api, "moving").finish()
    asked = KeepAsking(api, "moving")
    for stream in asked.streams[:NUM_STREAMS]:
        assert stream.has_begun.wait(60), stream.error
    calls = [train_step(client, "streams", seed, sequences=LONG_BATCH) for seed in range(2, 6)]
    second = client.publish("streams", "moving")
    streams = asked.finish()
    of_second = answers(api, "moving")
    client.close_session("streams")

    assert first.version != second.version
    assert all(a != b for a, b in zip(of_first, of_second, strict=True))
    assert [stream.error for stream in calm + streams if stream.error] == []
    versions = []
    for stream in streams:
        index = PROMPTS.index(stream.prompt)
        assert stream.tokens in (of_first[index], of_second[index])
        versions.append(1 if stream.tokens == of_first[index] else 2)
    assert set(versions) == {1, 2}
    pieces = [sum(began < at < ended for stream in streams for at in stream.times) for began, ended in calls]
    print(
        f"{len(streams)} streams, {versions.count(2)} of the new version, published in {second.publish_ms:.0f} ms; "
        f"pieces during each training call {pieces}; longest stall {longest_stall_ms(streams):.0f} ms, "
        f"without training {longest_stall_ms(calm):.0f} ms"
    )
    # All calls together: one that begins while the clients ask again may end before the first answer.
    assert sum(pieces) >= FEWEST_PIECES
    assert api.get("/kt/status?verify=true")["fingerprint"] == fingerprint


def test_a_warm_prefix_is_never_used_by_another_version(api: ServerAPI, client: ResidentClient) -> None:
    prompt = [50 + index % 600 for index in range(256)]
    client.create_session("warm", LoraSettings(rank=4, alpha=8, seed=2))
    train_step(client, "warm", seed=11)
    client.publish("warm", "prefix")
    cold = generate(api, prompt, "prefix")
    warm = generate(api, prompt, "prefix")
    assert cold["meta_info"]["cached_tokens"] == 0 and warm["meta_info"]["cached_tokens"] > 200
    assert warm["output_ids"] == cold["output_ids"]

    train_step(client, "warm", seed=12)
    client.publish("warm", "prefix")
    client.close_session("warm")
    after = generate(api, prompt, "prefix")
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["output_ids"] != cold["output_ids"]
    flush_cache(api)
    assert generate(api, prompt, "prefix")["output_ids"] == after["output_ids"]


def test_rollback_serves_the_version_before(api: ServerAPI, client: ResidentClient) -> None:
    client.create_session("back", LoraSettings(rank=4, alpha=8, seed=3))
    train_step(client, "back", seed=21)
    first = client.publish("back", "rolled")
    of_first = generate(api, PROMPTS[0], "rolled")["output_ids"]
    train_step(client, "back", seed=22)
    client.publish("back", "rolled")
    client.close_session("back")
    assert generate(api, PROMPTS[0], "rolled")["output_ids"] != of_first
    assert api.post("/kt/adapters/rolled/rollback", {"version": None})["version"] == first.version
    assert generate(api, PROMPTS[0], "rolled")["output_ids"] == of_first
    assert api.get("/kt/adapters/rolled")["current"] == first.version


def test_two_adapters_and_the_base_in_one_batch_give_what_each_gives_alone(
    api: ServerAPI, client: ResidentClient
) -> None:
    for name, rank, seed in (("one", 8, 31), ("two", 4, 32)):
        client.create_session(name, LoraSettings(rank=rank, alpha=16, seed=seed))
        train_step(client, name, seed)
        client.publish(name, name)
        client.close_session(name)
    adapters = ["one", None, "two", "one", "two", None]
    prompts = PROMPTS[: len(adapters)]
    alone = [generate(api, prompt, adapter)["output_ids"] for prompt, adapter in zip(prompts, adapters, strict=True)]
    flush_cache(api)
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "lora_path": adapters,
    }
    together = [answer["output_ids"] for answer in api.post("/generate", body)]
    assert together == alone
    assert len({tuple(generate(api, PROMPTS[0], adapter)["output_ids"]) for adapter in ("one", "two", None)}) == 3


def test_an_adapter_that_was_never_published_is_refused_by_name(api: ServerAPI, tmp_path: Path) -> None:
    answer = httpx.post(
        f"{api.url}/generate", json={"input_ids": PROMPTS[0], "lora_path": "nobody"}, timeout=60, trust_env=False
    )
    assert answer.status_code == 404 and "nobody" in answer.text
