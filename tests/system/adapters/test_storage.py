"""A real server whose adapter directory is full, slow, gone, taken, or in disorder: it serves, says what is not stored,
loses none.

One server, and then another over the same directory. A disk that is full, or does not let files be removed, is one
whose system calls fail in the server's process (`reference/faulty_disk.py`), as they would.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from reference import lora
from reference.cache import faulty_disk

from kt_runtime.adapters import VersionStore, as_version
from kt_runtime.cli.adapter.command import command
from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import free_port, server
from kt_runtime.errors import AdapterError, ConflictError, LimitError
from kt_runtime.families import family_for
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings

PRESET = "tiny-qwen3-moe"
FULL = {"fail": dict.fromkeys(("open", "make", "write", "sync"), "ENOSPC")}
SLOW = {"hang": ["open", "make", "write", "sync"]}
STUCK = {"fail": {"remove": "EPERM"}}
LOADED = ("one", "two", "three")
MAX_ADAPTERS = 8  # those of the first server, "trap" and "owned"


def eventually(condition: Callable[[], Any], limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@dataclass
class Place:
    """What outlives a server: model, adapters, the file that says how the disk fails."""

    root: Path

    @property
    def adapters(self) -> Path:
        return self.root / "adapters"

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / "model" / "config.json").read_text())
        return found

    def fault(self, what: dict[str, Any]) -> None:
        temporary = self.root / "faults.new"
        temporary.write_text(json.dumps({"directory": str(self.adapters), **what}))
        os.replace(temporary, self.root / "faults.json")

    def heal(self) -> None:
        (self.root / "faults.json").unlink(missing_ok=True)

    @contextlib.contextmanager
    def serving(self, log: str) -> Iterator[ServerAPI]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(faulty_disk.CONTROL, str(self.root / "faults.json"))
            options = ["--dtype", "float32", "--adapter-dir", str(self.adapters)]
            options += ["--max-adapters", str(MAX_ADAPTERS)]
            with server(str(self.root / "model"), options, self.root / log) as api:
                yield api


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("storage")
    make_model(PRESET, root / "model", seed=2)
    return Place(root)


@dataclass
class Story:
    """What was seen of the first server, in the order of the fields, and the second one while it runs.

    `told`: GET /kt/adapters, `status`, `shown` (the command) and `listed` while the disk was full. `refusal`: of a
    second server with the same directory. `answers` and `versions` by name, before and after the restart.
    """

    told: dict[str, Any]
    status: dict[str, Any]
    listed: str
    not_finite: str
    refusal: subprocess.CompletedProcess[str]
    pid: int
    answers: dict[str | None, list[int]]
    versions: dict[str, str]
    api: ServerAPI
    log: Path


def adapters(api: ServerAPI) -> dict[str, Any]:
    return {adapter["name"]: adapter for adapter in api.get("/kt/adapters")["adapters"]}


def answer(api: ServerAPI, name: str | None) -> list[int]:
    body = {
        "input_ids": [9, 8, 7, 6],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        "lora_path": name,
    }
    return list(api.post("/generate", body)["output_ids"])


def train_step(client: ResidentClient, session: str, learning_rate: float) -> None:
    tokens = np.random.default_rng(1).integers(3, 700, (2, 17)).tolist()
    client.forward_backward(session, Batch.from_sequences([row[:-1] for row in tokens], [row[1:] for row in tokens]))
    client.optim_step(session, learning_rate)


def second_server(place: Place, runtime: Path) -> subprocess.CompletedProcess[str]:
    """With a port and a runtime directory of its own."""
    runtime.mkdir(mode=0o700)
    options = ["--model", str(place.root / "model"), "--port", str(free_port()), "--adapter-dir", str(place.adapters)]
    return subprocess.run(
        [sys.executable, "-P", "-m", "kt_runtime.cli.main", "serve", *options],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def story(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    for seed, name in enumerate(LOADED):
        adapter = lora.random_adapter(place.config, rank=4, alpha=8.0, seed=seed)
        lora.write_adapter(place.root / "sources" / name, adapter)
    with place.serving("first.log") as api, resident_client(api) as client:
        place.fault(FULL)
        for name in LOADED:
            api.post("/kt/adapters", {"name": name, "path": str(place.root / "sources" / name)})
        client.create_session("run", LoraSettings(rank=4, alpha=8.0), publishes="trained")
        train_step(client, "run", 0.01)
        client.publish("run", "trained")
        eventually(lambda: all("No space" in str(a["versions"][0]["not_stored"]) for a in adapters(api).values()))
        told, status = adapters(api), api.get("/kt/status")
        listed = CliRunner().invoke(command, ["list", "--url", api.url], env={"COLUMNS": "200"}).output
        refusal = second_server(place, tmp_path_factory.mktemp("runtime") / "r")
        pid = int((place.adapters / ".lock").read_text())
        place.heal()
        eventually(lambda: all(version["stored"] for a in adapters(api).values() for version in a["versions"]))
        load_while_the_disk_hangs(api, place)
        load_while_the_disk_is_gone(api, place)
        huge = lora.write_adapter(place.root / "sources" / "huge", lora.huge_adapter(place.config))
        client.load("run", str(huge))
        with pytest.raises(AdapterError) as not_finite:
            client.publish("run", "trained")
        answers = {name: answer(api, name) for name in (None, *LOADED, "slow", "gone", "trained")}
        versions = {name: adapter["current"] for name, adapter in adapters(api).items()}
    write_trap(place)
    (place.adapters / ".tmp-left").write_text("half")
    place.fault(STUCK)
    with place.serving("second.log") as api:
        place.heal()
        log = place.root / "second.log"
        yield Story(told, status, listed, str(not_finite.value), refusal, pid, answers, versions, api, log)


def load_while_the_disk_hangs(api: ServerAPI, place: Place) -> None:
    place.fault(SLOW)
    api.post("/kt/adapters", {"name": "slow", "path": str(place.root / "sources" / "one")})
    assert answer(api, "slow") == answer(api, "one")
    assert not adapters(api)["slow"]["versions"][0]["stored"]
    place.heal()
    eventually(lambda: adapters(api)["slow"]["versions"][0]["stored"])


def load_while_the_disk_is_gone(api: ServerAPI, place: Place) -> None:
    """As when it is not mounted any more: nothing may be written at its mount's point."""
    place.adapters.rename(place.root / "unplugged")
    api.post("/kt/adapters", {"name": "gone", "path": str(place.root / "sources" / "two")})
    assert answer(api, "gone") == answer(api, "two")
    eventually(lambda: "the directory is gone" in str(adapters(api)["gone"]["versions"][0]["not_stored"]))
    assert not place.adapters.exists()
    (place.root / "unplugged").rename(place.adapters)
    eventually(lambda: adapters(api)["gone"]["versions"][0]["stored"])


def write_trap(place: Place) -> None:
    """A version that a server without the gate has published: every number is finite, no forward pass is."""
    config = place.config
    family = family_for(config)
    store = VersionStore(place.adapters, family, config, 16)
    version = store.save("trap", as_version(lora.huge_adapter(config), family, config), created=1.0)
    store.point("trap", [version.hash])


def test_what_a_full_disk_refuses_is_served_and_shown(story: Story) -> None:
    assert set(story.told) == {*LOADED, "trained"}
    for adapter in story.told.values():
        (version,) = adapter["versions"]
        assert adapter["current"] == version["version"] and not version["stored"]
    assert {(entry["name"], entry["is_waiting"]) for entry in story.status["not_stored"]} == {
        (name, True) for name in story.told
    }
    for name in story.told:
        assert (
            f"{name}, version {story.told[name]['current'][:16]} is not stored: No space left on device" in story.listed
        )


def test_a_second_server_of_the_directory_is_refused_before_it_loads_anything(story: Story) -> None:
    assert story.refusal.returncode == 2
    said = story.refusal.stderr + story.refusal.stdout
    assert "--adapter-dir" in said and f"is in use by process {story.pid}" in said and "Traceback" not in said
    assert "Load weight" not in said


def test_after_a_restart_everything_is_there_that_was_not_stored_at_first(story: Story) -> None:
    served = adapters(story.api)
    assert {name: served[name]["current"] for name in story.versions} == story.versions  # as soon as it was ready
    assert {name: answer(story.api, name) for name in story.answers} == story.answers
    assert story.answers["one"] != story.answers["two"]


def test_an_undeletable_file_is_reported_and_ends_nothing(story: Story, place: Place) -> None:
    said = story.log.read_text()
    assert f"{place.adapters}/.tmp-left: left half written by an earlier server, and can't be removed" in said
    assert story.api.get("/kt/status")["adapter_directory"] == str(place.adapters)


def test_an_adapter_whose_forward_pass_is_not_finite_is_neither_published_nor_restored(story: Story) -> None:
    assert "adapter 'trained': its forward pass is not finite" in story.not_finite
    trap = adapters(story.api)["trap"]
    assert trap["current"] is None and "not finite" in trap["problem"]
    refused = httpx.post(
        f"{story.api.url}/generate", json={"input_ids": [1], "lora_path": "trap"}, timeout=60, trust_env=False
    )
    assert refused.status_code == 404
    assert answer(story.api, None) == story.answers[None]


def test_a_name_belongs_to_the_session_that_publishes_it(story: Story, place: Place) -> None:
    api, source = story.api, str(place.root / "sources" / "one")
    assert story.told["trained"]["owner"] == "run" and story.told["one"]["owner"] is None
    with resident_client(api) as client:
        for session in ("first", "second"):
            client.create_session(session, LoraSettings(rank=4, alpha=8.0))
        client.publish("first", "owned")
        with pytest.raises(ConflictError, match="'owned' is published by session 'first' since"):
            client.publish("second", "owned")
        refused = httpx.post(
            f"{api.url}/kt/adapters", json={"name": "ninth", "path": source}, timeout=60, trust_env=False
        )
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
        assert "8 adapters are there; allowed are 8 (--max-adapters)" in refused.json()["error"]["message"]
        with pytest.raises(LimitError, match="allowed are 8"):
            client.publish("second", "ninth")
        body = {"name": "owned", "path": source}
        refused = httpx.post(f"{api.url}/kt/adapters", json=body, timeout=60, trust_env=False)
        assert refused.status_code == 409 and "session 'first'" in refused.json()["error"]["message"]
        api.delete("/kt/adapters/owned")
        with pytest.raises(ConflictError, match="'owned' was unloaded at"):
            client.publish("first", "owned")
        assert "owned" not in adapters(api)
        client.publish("first", "owned", take_over=True)
        api.post("/kt/adapters", {**body, "take_over": True})
        with pytest.raises(ConflictError, match="taken over by loading another adapter"):
            client.publish("first", "owned")
        for session in ("first", "second"):
            client.close_session(session)
    api.delete("/kt/adapters/owned")
