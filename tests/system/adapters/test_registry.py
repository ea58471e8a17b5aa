"""Two real servers of one registry: trained on one, served by both; killed, without the registry, and back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from reference.cache import faulty_disk

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings

PRESET = "tiny-qwen3-moe"
FULL = dict.fromkeys(("open", "make", "write", "sync"), "ENOSPC")
OPTIONS = ("--dtype", "float32", "--max-lora-rank", "8", "--max-total-tokens", "4096", "--finetuning-dir", "off")


def eventually(condition: Callable[[], Any], limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@dataclass
class Place:
    root: Path

    @property
    def registry(self) -> Path:
        return self.root / "registry"

    @contextlib.contextmanager
    def serving(self, name: str) -> Iterator[ServerAPI]:
        options = [*OPTIONS, "--adapter-dir", str(self.root / name), "--registry", str(self.registry)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(faulty_disk.CONTROL, str(self.root / "faults.json"))
            with server(str(self.root / "model"), options, self.root / f"{name}.log") as api:
                yield api

    @contextlib.contextmanager
    def full_disk(self, name: str) -> Iterator[None]:
        """Of this server's adapter directory."""
        (self.root / "faults.new").write_text(json.dumps({"directory": str(self.root / name), "fail": FULL}))
        os.replace(self.root / "faults.new", self.root / "faults.json")
        yield
        (self.root / "faults.json").unlink()

    def kill(self, name: str) -> None:
        """All processes of the server, as when its machine loses power."""
        for process in psutil.Process().children(recursive=True):
            if f"--adapter-dir {self.root / name} " in " ".join(process.cmdline()):
                os.killpg(os.getpgid(process.pid), signal.SIGKILL)
                return
        raise AssertionError(f"no server {name}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("replicas")
    make_model(PRESET, root / "model", seed=2)
    return Place(root)


@pytest.fixture(scope="module")
def first(place: Place) -> Iterator[ServerAPI]:
    with place.serving("first") as api:
        yield api


def current(api: ServerAPI, name: str) -> str | None:
    found = {adapter["name"]: adapter["current"] for adapter in api.get("/kt/adapters")["adapters"]}
    return found.get(name)


def tokens(api: ServerAPI, name: str | None) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    return list(
        api.post("/generate", {"input_ids": [9, 8, 7, 6], "sampling_params": sampling, "lora_path": name})["output_ids"]
    )


def train_and_publish(client: ResidentClient, session: str, name: str) -> str:
    rows = np.random.default_rng(1).integers(3, 700, (2, 17)).tolist()
    client.forward_backward(session, Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows]))
    client.optim_step(session, 0.02)
    return client.publish(session, name).version


def registry_name(api: ServerAPI, name: str) -> dict[str, Any]:
    return next(each for each in api.get("/kt/registry")["names"] if each["name"] == name)


def test_what_one_server_trains_the_other_serves_and_a_killed_one_catches_up(place: Place, first: ServerAPI) -> None:
    base = tokens(first, None)
    with resident_client(first) as client:
        client.create_session("run", LoraSettings(rank=4, alpha=8.0), publishes="trained")
        with place.serving("second") as second:
            version = train_and_publish(client, "run", "trained")
            eventually(lambda: current(second, "trained") == version)
            assert tokens(second, "trained") == tokens(first, "trained") != base
            assert tokens(second, None) == base
            eventually(lambda: registry_name(second, "trained")["revision_here"] == 1)
            eventually(lambda: len(first.get("/kt/status")["registry"]["replicas"]) == 2)
            eventually(lambda: registry_name(first, "trained")["not_moved"] == [])

            # Another publisher of the name: the later revision everywhere, and the session goes on.
            assert train_and_publish(client, "run", "trained") != version
            eventually(lambda: registry_name(second, "trained")["revision_here"] == 2)
            second.post("/kt/adapters/trained/rollback", {"version": version})
            eventually(lambda: current(first, "trained") == version)
            assert registry_name(first, "trained")["revision"] == 3
            with place.full_disk("second"):
                newest = train_and_publish(client, "run", "trained")
                eventually(lambda: "No space left" in str(registry_name(second, "trained")["problem"]))
                eventually(lambda: [each["replica"] for each in registry_name(first, "trained")["not_moved"]])
                assert current(second, "trained") == version and tokens(second, "trained")
            eventually(lambda: current(second, "trained") == newest)
            place.kill("second")
        for _ in range(2):
            newest = train_and_publish(client, "run", "trained")
        eventually(lambda: not registry_name(first, "trained")["is_unpublished"])
        answer = tokens(first, "trained")
        with place.serving("second") as second:  # once it is ready, it has caught up
            assert current(second, "trained") == newest and tokens(second, "trained") == answer
            second.delete("/kt/adapters/trained")
            eventually(lambda: current(first, "trained") is None)
            assert registry_name(first, "trained")["version"] is None
        client.close_session("run")


def test_without_its_registry_a_server_serves_loads_and_says_so(place: Place, first: ServerAPI) -> None:
    with resident_client(first) as client:
        client.create_session("alone", LoraSettings(rank=4, alpha=8.0))
        before = train_and_publish(client, "alone", "alone")
        eventually(lambda: registry_name(first, "alone")["revision_here"] == 1)
        place.registry.rename(place.root / "elsewhere")
        eventually(lambda: first.get("/kt/status")["registry"]["problem"])
        after = train_and_publish(client, "alone", "alone")
        assert current(first, "alone") == after != before and tokens(first, "alone")
        assert first.is_ready() and registry_name(first, "alone")["is_unpublished"]
        (place.root / "elsewhere").rename(place.registry)
        eventually(lambda: registry_name(first, "alone")["revision_here"] == 2)
        eventually(lambda: first.get("/kt/registry")["problem"] is None)
        client.close_session("alone")
