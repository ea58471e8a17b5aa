"""A real server of two ranks and one of a single rank, side by side, with the options that bound and share what a
server has: a registry of both, kept routes, memory and disk for adapters. Equal to the bit.

Fine-tuning jobs, and a registry on two hosts: test_hosts.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from reference import lora
from reference.cache import faulty_disk
from reference.server.greedy import Answer, ask
from system import forked_server

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings

SECONDS = 120.0
PROMPTS = [[5, *range(40, 40 + length)] for length in (3, 40, 150)]
LORA_BYTES, DISK_BYTES = 1 << 20, 1 << 30
OPTIONS = (
    *("--expert-threads", "1", "--max-lora-rank", "8", "--max-running-requests", "8", "--exact"),
    *("--routing-replay", "16MiB", "--lora-memory", str(LORA_BYTES), "--max-adapter-disk", str(DISK_BYTES)),
)


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.05)


@dataclass(frozen=True)
class Place:
    root: Path

    def adapters(self, name: str) -> Path:
        return self.root / f"{name}-adapters"

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    @contextlib.contextmanager
    def serving(self, name: str, ranks: int, *options: str) -> Iterator[ServerAPI]:
        place = ("--adapter-dir", str(self.adapters(name)), "--registry", str(self.root / "registry"))
        arguments = ["--tp-size", str(ranks), *OPTIONS, *place, *options, "--", "--chunked-prefill-size", "64"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(faulty_disk.CONTROL, str(self.root / f"{name}-faults.json"))
            with server(str(self.root / "model"), arguments, self.root / f"{name}.log") as api:
                yield api

    def set_faults(self, name: str, faults: dict[str, Any]) -> None:
        (self.root / "faults.new").write_text(json.dumps(faults))
        os.replace(self.root / "faults.new", self.root / f"{name}-faults.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("options")
    make_model("tiny-qwen3-moe", root / "model", seed=6)
    return Place(root)


class Servers:
    """Of one rank, and of two. Each starts when a test asks for it, and again after its `end`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._running: dict[str, tuple[ServerAPI, contextlib.ExitStack]] = {}

    def of(self, name: str, ranks: int) -> ServerAPI:
        if name not in self._running:
            held = contextlib.ExitStack()
            self._running[name] = held.enter_context(self._place.serving(name, ranks)), held
        return self._running[name][0]

    def end(self, name: str) -> None:
        if name in self._running:
            self._running.pop(name)[1].close()


@pytest.fixture(scope="module")
def servers(place: Place) -> Iterator[Servers]:
    made = Servers(place)
    yield made
    for name in ("one", "two"):
        made.end(name)


@pytest.fixture
def one(servers: Servers) -> ServerAPI:
    return servers.of("one", 1)


@pytest.fixture
def two(servers: Servers) -> ServerAPI:
    return servers.of("two", 2)


def current(api: ServerAPI, name: str) -> str | None:
    return {each["name"]: each["current"] for each in api.get("/kt/adapters")["adapters"]}.get(name)


def wait_for(api: ServerAPI, name: str, version: str | None) -> None:
    eventually(lambda: current(api, name) == version)


def has_moved_everywhere(api: ServerAPI, name: str) -> bool:
    return registry_name(api, name)["not_moved"] == []


def registry_name(api: ServerAPI, name: str) -> dict[str, Any]:
    absent = {"revision": 0, "revision_here": 0, "not_moved": None}
    return next((each for each in api.get("/kt/registry")["names"] if each["name"] == name), absent)


def answers(api: ServerAPI, name: str | None) -> list[Answer]:
    return [ask(api, prompt, name) for prompt in PROMPTS]


def batch(seed: int, *lengths: int) -> Batch:
    random = np.random.default_rng(seed)
    rows = [random.integers(3, 700, length + 1).tolist() for length in lengths]
    return Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])


def train_and_publish(api: ServerAPI, name: str, steps: int) -> str:
    with resident_client(api) as client:
        client.create_session(name, LoraSettings(rank=4, alpha=8.0, targets=["all"], seed=5))
        for step in range(steps):
            client.forward_backward(name, batch(step, 40, 11))
            client.optim_step(name, 0.02)
        version = client.publish(name, name).version
        client.close_session(name)
    return version


def test_what_either_publishes_both_serve_with_the_same_bits(one: ServerAPI, two: ServerAPI) -> None:
    assert two.get("/kt/status")["fingerprint"] == one.get("/kt/status")["fingerprint"] != ""
    versions = []
    for publisher, other, steps in ((one, two, 1), (two, one, 2)):
        versions.append(train_and_publish(publisher, "shared", steps))
        wait_for(other, "shared", versions[-1])
        assert answers(one, "shared") == answers(two, "shared")
    two.post("/kt/adapters/shared/rollback", {"version": versions[0]})
    wait_for(one, "shared", versions[0])
    for api in (one, two):
        eventually(partial(has_moved_everywhere, api, "shared"))
    assert answers(one, "shared") == answers(two, "shared") != answers(two, None)
    one.delete("/kt/adapters/shared")
    wait_for(two, "shared", None)


def replayed(api: ServerAPI, path: Path) -> dict[str, Any]:
    """Steps with the experts that serving chose for the base's answers, which the present routers move."""
    rows = [prompt + ask(api, prompt)[0] for prompt in PROMPTS]
    sent = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
    found: dict[str, Any] = {}
    with resident_client(api) as client:
        client.create_session("replay", LoraSettings(rank=4, alpha=8.0, targets=["all"], seed=5))
        for step in range(4):
            result = client.forward_backward("replay", sent, routing_replay="rollout")
            norm = client.optim_step("replay", 0.05).grad_norm
            found[f"step {step}"] = (result.loss, norm, result.metrics)
        for how in ("off", "compare", "rollout"):
            ended = client.forward("replay", sent, routing_replay=how)
            found[how] = ([each.tolist() for each in ended.logprobs], ended.metrics)
        client.save("replay", str(path))
        client.close_session("replay")
    assert found["step 0"][2]["routes/replayed"] == sent.num_tokens and found["step 0"][2]["routes/moved"] == 0
    assert found["compare"][1]["routes/moved"] > 0 and found["off"][0] == found["compare"][0] != found["rollout"][0]
    return found | {"masters": (path / "adapter_model.safetensors").read_bytes()}


def test_kept_routes_and_what_trains_with_them_are_those_of_one_rank(
    one: ServerAPI, two: ServerAPI, tmp_path: Path
) -> None:
    expected = replayed(one, tmp_path / "one")
    for name, value in replayed(two, tmp_path / "two").items():
        assert value == expected[name], name


def left_slots(place: Place, rank: int) -> list[set[str]]:
    """Ids of adapters that left their slots, in the order of the server's log."""
    lines = re.findall(rf" TP{rank} .*left their slots, of which {LORA_BYTES // 2} bytes .*: (.*)", place.log("two"))
    return [set(re.findall("[0-9a-f]{32}", line)) for line in lines]


def test_adapters_leave_and_enter_the_slots_of_all_ranks_together(place: Place, one: ServerAPI, two: ServerAPI) -> None:
    """Seven adapters, of which a rank's half of the memory holds three."""
    config = json.loads((place.root / "model" / "config.json").read_text(encoding="utf-8"))
    names = [f"many-{seed}" for seed in range(7)]
    for seed, name in enumerate(names):
        lora.write_adapter(place.root / name, lora.random_adapter(config, rank=8, alpha=8.0, seed=seed))
        one.post("/kt/adapters", {"name": name, "path": str(place.root / name)})
        wait_for(two, name, current(one, name))
    expected = {name: ask(one, PROMPTS[1], name) for name in names}
    for name in (*names, *reversed(names)):
        assert ask(two, PROMPTS[1], name) == expected[name]
    with ThreadPoolExecutor(8) as pool:
        asked = [(name, pool.submit(ask, two, PROMPTS[1], name)) for name in 3 * names]
        assert [each.result() == expected[name] for name, each in asked] == [True] * len(asked)
    eventually(lambda: left_slots(place, 0) == left_slots(place, 1))
    assert len(left_slots(place, 0)) > len(names)
    for name in names:
        one.delete(f"/kt/adapters/{name}")
        wait_for(two, name, None)


def test_a_full_adapter_directory_refuses_on_all_ranks_and_they_go_on(place: Place, two: ServerAPI) -> None:
    config = json.loads((place.root / "model" / "config.json").read_text(encoding="utf-8"))
    path = lora.write_adapter(place.root / "one-more", lora.random_adapter(config, rank=4, alpha=8.0, seed=9))
    body = {"name": "one-more", "path": str(path)}

    def load() -> httpx.Response:
        return httpx.post(f"{two.url}/kt/adapters", json=body, timeout=SECONDS, trust_env=False)

    large = place.adapters("two") / "large"
    with large.open("wb") as file:
        file.truncate(DISK_BYTES)  # without blocks on the disk
    try:
        eventually(lambda: load().status_code != 200)
        assert "(--max-adapter-disk)" in load().text
        base = answers(two, None)
    finally:
        large.unlink()
    eventually(lambda: load().status_code == 200)
    assert answers(two, None) == base
    two.delete("/kt/adapters/one-more")


def test_a_rank_killed_while_a_version_is_fetched_moves_no_name(place: Place, servers: Servers) -> None:
    """The server's disk hangs where it is to write what it fetches. Once it is started again, it has caught up."""
    one, two = servers.of("one", 1), servers.of("two", 2)
    first = train_and_publish(one, "fetched", 1)
    eventually(lambda: registry_name(two, "fetched")["revision_here"] == 1)
    before = answers(two, "fetched")
    assert before == answers(one, "fetched")
    place.set_faults("two", {"directory": str(place.adapters("two") / ".registry"), "hang": ["make"]})
    try:
        newest = train_and_publish(one, "fetched", 2)
        eventually(lambda: registry_name(two, "fetched")["revision"] == 2)
        assert current(two, "fetched") == first and answers(two, "fetched") == before
        frontend = forked_server.frontend_of(place.adapters("two"))  # named in its command
        processes = [frontend, *frontend.children(recursive=True)]
        pid = two.get("/kt/status")["ranks"][1]["pid"]
        psutil.Process(pid).kill()
        eventually(lambda: not any(has_not_ended(process) for process in processes))
    finally:
        place.set_faults("two", {"directory": "/nowhere"})
        servers.end("two")
    assert f"rank 1 (process {pid}) has died: SIGKILL; the server ends" in place.log("two")
    assert [path.name for path in (place.adapters("two") / "fetched").iterdir() if path.is_dir()] == [first]
    assert current(one, "fetched") == newest
    two = servers.of("two", 2)
    assert current(two, "fetched") == newest
    assert answers(two, "fetched") == answers(one, "fetched") != before
    eventually(lambda: registry_name(two, "fetched")["revision_here"] == 2)
    one.delete("/kt/adapters/fetched")
    wait_for(two, "fetched", None)


def has_not_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
