"""A real server whose cache directory is damaged, fails, or is killed while it writes: it continues, and answers right.

The faults of the disk are real where that needs no special rights (bytes changed, files cut off, the directory moved
away); a disk that is full, read-only, broken or slow is one whose system calls fail or wait in the server's process
(`reference/cache/faulty_disk.py`), as they would.

A tier that waits two seconds for its disk notices a busy machine as a slow disk. So the servers wait a minute, except
the one whose disk hangs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.cache import faulty_disk
from reference.cache.records import DAMAGES, Placed, placed

from kt_runtime.cache import inspection
from kt_runtime.cache.disk import Use
from kt_runtime.errors import KtError
from kt_runtime.serve.models.make_model import make_model

PRESET = "tiny-qwen3-moe"
PROMPT_TOKENS, PAGE_TOKENS = 200, 16
CACHED_TOKENS, PAGES = 192, 12  # whole pages; the last token is always computed
ONE_RECORD = ("a bit flipped", "of a foreign model", "of an old format")
FULL = {"fail": dict.fromkeys(("open", "write", "sync"), "ENOSPC")}
READ_ONLY = {"fail": dict.fromkeys(("open", "write", "sync", "remove", "rename"), "EROFS")}
BROKEN = {"fail": {"read": "EIO"}}
PATIENT_SECONDS = "60"
USES = tuple(use.value for use in Use)
QUOTA = 2 << 20
SMALL = {"disk": "2MiB", "device_tokens": 1024, "host_tokens": 2048}


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 700, PROMPT_TOKENS).tolist()


def eventually(condition: Callable[[], Any], limit_s: float = 70.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@dataclass
class Disk:
    """The disk of a running server, in the test's hand."""

    served: Any
    control: Path

    def status(self) -> dict[str, Any]:
        (tier,) = [tier for tier in self.served.api.get("/kt/status")["cache"] if tier["tier"] == "disk"]
        return dict(tier)

    def works(self) -> bool:
        status = self.status()
        return status["reading_stopped"] is None and status["writing_stopped"] is None

    def fault(self, what: dict[str, Any]) -> None:
        temporary = self.control.with_suffix(".new")
        temporary.write_text(json.dumps({"directory": str(self.served.cache_directory), **what}), encoding="utf-8")
        os.replace(temporary, self.control)

    def num_failures(self) -> int:
        """Calls that have failed since the server began."""
        failures = faulty_disk.failures_file(self.control)
        return failures.stat().st_size if failures.exists() else 0

    def heal(self) -> None:
        self.control.unlink(missing_ok=True)

    def store(self, seed: int) -> Any:
        """The answer, computed, to a prompt whose pages are on the disk afterwards."""
        before = self.status()["counters"]["records_written"]
        answer = self.served.ask(prompt(seed))
        assert answer.tiers["computed"] == PROMPT_TOKENS
        eventually(lambda: self.status()["counters"]["records_written"] >= before + PAGES)
        return answer

    def ask(self, seed: int) -> Any:
        """From the disk, as far as it can be."""
        self.served.flush_memory()
        return self.served.ask(prompt(seed))

    def said(self, since: int) -> list[str]:
        """What the log says of the disk, from that byte on."""
        text = self.served.log.read_bytes()[since:].decode(errors="replace")
        return [line for line in text.splitlines() if "cache: " in line and str(self.served.cache_directory) in line]

    def last_said(self, use: str) -> str:
        return next((line for line in reversed(self.said(0)) if use in line), "")

    def log_bytes(self) -> int:
        return int(self.served.log.stat().st_size)


@contextlib.contextmanager
def shimmed(control: Path, *, is_patient: bool = True) -> Iterator[None]:
    """Servers started meanwhile have a disk that fails when `control` says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faulty_disk.CONTROL, str(control))
        patch.delenv(faulty_disk.PATIENCE, raising=False)  # of the module's server
        if is_patient:
            patch.setenv(faulty_disk.PATIENCE, PATIENT_SECONDS)
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cached_server: Any) -> Iterator[Disk]:
    place = tmp_path_factory.mktemp("faults")
    with shimmed(place / "faults.json"), cached_server(PRESET, place) as served:
        yield Disk(served, place / "faults.json")


@pytest.fixture
def impatient(tmp_path: Path, cached_server: Any) -> Iterator[Disk]:
    """Of a server with the patience that every server has."""
    with shimmed(tmp_path / "faults.json", is_patient=False), cached_server(PRESET, tmp_path) as served:
        disk = Disk(served, tmp_path / "faults.json")
        yield disk
        disk.heal()


@pytest.fixture
def disk(server: Disk) -> Iterator[Disk]:
    assert server.works()
    yield server
    server.heal()
    eventually(server.works)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_a_miss_counted_quarantined_and_the_answer_is_right(damage: str, disk: Disk) -> None:
    seed = 100 + list(DAMAGES).index(damage)
    directory = disk.served.cache_directory
    known = {each.header.key for each in placed(directory)}
    cold = disk.store(seed)
    records = [each for each in placed(directory) if each.header.key not in known][:PAGES]
    before, position = disk.status(), 5
    DAMAGES[damage](records, position)
    first_bad = _first_bad(damage, records, position)
    found = disk.ask(seed)
    assert found.tiers["disk"] == first_bad * PAGE_TOKENS
    assert found.tiers["computed"] == PROMPT_TOKENS - first_bad * PAGE_TOKENS
    assert found.tokens == cold.tokens
    assert found.logprobs == cold.logprobs
    after = disk.status()
    most = 1 if damage in ONE_RECORD else PAGES - first_bad
    assert 1 <= after["corrupt"] - before["corrupt"] <= most
    assert after["misses"] > before["misses"]
    assert records[first_bad].name_quarantined in os.listdir(directory / "quarantine")
    eventually(lambda: disk.status()["counters"]["records_written"] > before["counters"]["records_written"])
    eventually(lambda: disk.ask(seed).tiers["disk"] == CACHED_TOKENS)  # it was written anew


def _first_bad(damage: str, records: list[Placed], position: int) -> int:
    if damage != "of length zero":
        return position
    return next(at for at, each in enumerate(records) if each.path == records[position].path)


def test_a_directory_that_is_taken_away_is_used_again_when_it_is_back(disk: Disk) -> None:
    cold, log = disk.store(230), disk.log_bytes()
    directory = disk.served.cache_directory
    directory.rename(directory.with_name("unplugged"))
    eventually(lambda: not disk.works())
    found = disk.ask(230)
    assert found.tiers["computed"] == PROMPT_TOKENS
    assert found.tokens == cold.tokens
    disk.served.ask(prompt(231))
    assert not directory.exists()
    eventually(lambda: len(disk.said(log)) == 1)
    directory.with_name("unplugged").rename(directory)
    eventually(disk.works)
    eventually(lambda: len(disk.said(log)) == 2)
    found = disk.ask(230)
    assert found.tiers["disk"] == CACHED_TOKENS
    assert found.tokens == cold.tokens


def test_a_directory_that_was_removed_is_filled_anew_when_there_is_one(disk: Disk) -> None:
    cold, log = disk.store(240), disk.log_bytes()
    directory = disk.served.cache_directory
    shutil.rmtree(directory)
    eventually(lambda: not disk.works())
    found = disk.ask(240)
    assert found.tiers["computed"] == PROMPT_TOKENS
    assert found.tokens == cold.tokens
    assert not directory.exists()
    directory.mkdir(mode=0o700)
    eventually(disk.works)
    eventually(lambda: len(disk.said(log)) == 2)
    assert disk.ask(240).tiers["computed"] == PROMPT_TOKENS
    eventually(lambda: disk.ask(240).tiers["disk"] == CACHED_TOKENS)


def test_a_disk_that_refuses_reads_is_read_again_when_it_does_not(disk: Disk) -> None:
    cold, log = [disk.store(seed) for seed in range(220, 225)], disk.log_bytes()
    disk.fault(BROKEN)
    for seed, expected in zip(range(220, 225), cold, strict=True):
        found = disk.ask(seed)
        assert found.tiers["computed"] == PROMPT_TOKENS
        assert found.tokens == expected.tokens
    assert disk.status()["counters"]["read_errors"] >= 3
    assert len(disk.said(log)) == 1
    disk.heal()
    eventually(disk.works)
    assert disk.ask(220).tiers["disk"] == CACHED_TOKENS
    eventually(lambda: len(disk.said(log)) == 2)


def test_a_disk_that_hangs_holds_nobody_up(impatient: Disk) -> None:
    disk = impatient
    stored = {seed: disk.store(seed) for seed in range(250, 258)}
    disk.served.flush_memory()
    disk.fault({"hang": ["read", "write", "sync"]})
    for seed, expected in stored.items():
        found = disk.served.ask(prompt(seed))
        assert found.tokens == expected.tokens
        assert found.tiers["disk"] == 0
    seeds = itertools.count(260)
    while not (disk.status()["reading_stopped"] and disk.status()["writing_stopped"]):
        assert disk.served.ask(prompt(next(seeds))).tiers["disk"] == 0
    eventually(lambda: all(disk.last_said(use).endswith(" s") for use in USES))  # "... takes longer than 10 s"
    said = disk.said(0)  # nothing ends a hanging call before `heal`: what is stopped now stays so
    for _ in range(3):
        assert disk.served.ask(prompt(next(seeds))).tiers["computed"] == PROMPT_TOKENS
    assert disk.said(0) == said
    disk.heal()
    eventually(disk.works)
    eventually(lambda: disk.ask(250).tiers["disk"] == CACHED_TOKENS)
    eventually(lambda: all(disk.last_said(use).endswith("works again") for use in USES))


@pytest.mark.parametrize("fault", [FULL, READ_ONLY], ids=["full", "read-only"])
def test_a_disk_that_can_not_be_written_is_read_and_written_when_it_can_be(fault: dict[str, Any], disk: Disk) -> None:
    seed = 200 if fault is FULL else 210
    cold, log = disk.store(seed), disk.log_bytes()
    disk.fault(fault)
    others = [disk.served.ask(prompt(seed + number)) for number in range(1, 4)]
    eventually(lambda: disk.status()["writing_stopped"])
    again = [disk.ask(seed + number) for number in range(4)]
    assert again[0].tiers["disk"] == CACHED_TOKENS
    assert again[0].tokens == cold.tokens
    for found, expected in zip(again[1:], others, strict=True):
        assert found.tiers["computed"] == PROMPT_TOKENS  # it was not written
        assert found.tokens == expected.tokens
    failed = disk.num_failures()
    eventually(lambda: disk.num_failures() >= failed + 2)  # it is tried again
    assert disk.status()["reading_stopped"] is None
    assert len(disk.said(log)) == 1
    assert "writing to" in disk.said(log)[0]
    disk.heal()
    eventually(disk.works)
    eventually(lambda: len(disk.said(log)) == 2)
    assert "writing to" in disk.said(log)[1]
    assert "works again" in disk.said(log)[1]
    assert disk.ask(seed + 1).tiers["computed"] == PROMPT_TOKENS
    eventually(lambda: disk.ask(seed + 1).tiers["disk"] == CACHED_TOKENS)


# A small quota, four clients, and kills


@dataclass
class Story:
    """`most_bytes`: in the directory while four clients wrote; `full_bytes`: afterwards. `hits`: by prompt, the last
    written first. `kept`: whether a prompt that was used now and then was still there. After each kill: what the
    directory's check found, and (cold answer, answer) of prompts whose pages had been written."""

    most_bytes: int
    full_bytes: int
    evictions: int
    hits: list[bool]
    kept: Any
    checked: list[inspection.Verification]
    after_kill: list[list[tuple[Any, Any]]]
    of_another_model: tuple[Any, Any]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, cached_server: Any) -> Story:
    place = tmp_path_factory.mktemp("small")
    control = place / "faults.json"
    checked, after_kill = [], []
    with shimmed(control):
        with cached_server(PRESET, place, **SMALL) as served:
            disk = Disk(served, control)
            most_bytes, full_bytes = _fill_with_four_clients(disk)
            evictions = disk.status()["evictions"]
            hits, kept = _find_in_order(disk)
            cold = _be_killed(disk, at_write=3, seed=700)
        for number in (2, 3):
            checked.append(inspection.verify(place / "cache"))
            control.unlink()
            with cached_server(PRESET, place, **SMALL) as served:
                disk = Disk(served, control)
                after_kill.append([(answer, disk.ask(seed)) for seed, answer in cold.items()])
                cold = _be_killed(disk, at_write=number, seed=700 + 100 * number)
        checked.append(inspection.verify(place / "cache"))
        control.unlink()
    shutil.rmtree(place / "model")
    make_model(PRESET, place / "model", seed=3)
    with cached_server(PRESET, place, **SMALL) as served:
        seed = next(iter(cold))
        of_another_model = (served.ask(prompt(seed)), Disk(served, control).ask(seed))
    return Story(most_bytes, full_bytes, evictions, hits, kept, checked, after_kill, of_another_model)


def _directory_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _fill_with_four_clients(disk: Disk) -> tuple[int, int]:
    """Twice what the quota holds, each prompt once."""
    sizes, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            sizes.append(_directory_bytes(disk.served.cache_directory))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(4) as clients:
        list(clients.map(lambda seed: disk.served.ask(prompt(seed), new_tokens=1), range(400, 432)))
    eventually(lambda: disk.status()["counters"]["records_written"] >= 24 * PAGES)
    stop.set()
    watcher.join()
    return max(sizes), _directory_bytes(disk.served.cache_directory)


def _find_in_order(disk: Disk) -> tuple[list[bool], Any]:
    """Twenty prompts one after the other, the first of which is asked for again from time to time."""
    disk.store(500)
    for seed in range(501, 520):
        disk.store(seed)
        if seed % 4 == 0:
            kept = disk.ask(500)
    hits = [disk.ask(seed).tiers["disk"] == CACHED_TOKENS for seed in range(519, 500, -1)]
    return hits, kept


def _be_killed(disk: Disk, at_write: int, seed: int) -> dict[int, Any]:
    """Prompts that are on the disk with their answers; others were just being written when the server was killed."""
    cold = {seed + number: disk.store(seed + number) for number in range(3)}
    disk.fault({"kill_at_write": at_write})
    with contextlib.suppress(KtError):
        for number in range(10, 30):
            disk.served.ask(prompt(seed + number), new_tokens=1)
    with pytest.raises(KtError):
        disk.served.api.get("/kt/status")
    eventually(lambda: inspection.statistics(disk.served.cache_directory).holder is None)  # it is gone at last
    return cold


def test_the_quota_holds_while_four_clients_write(story: Story) -> None:
    assert story.most_bytes <= QUOTA * 1.01
    assert QUOTA * 0.95 <= story.full_bytes <= QUOTA
    assert story.evictions > 100


def test_what_was_used_least_recently_is_evicted_first(story: Story) -> None:
    present = story.hits.index(False)
    assert present >= 8
    assert not any(story.hits[present:])
    assert story.kept.tiers["disk"] == CACHED_TOKENS


def test_a_server_killed_at_a_write_loses_at_most_what_was_in_flight(story: Story) -> None:
    for answers in story.after_kill:
        for cold, found in answers:
            assert found.tiers["disk"] == CACHED_TOKENS
            assert found.tokens == cold.tokens
            assert found.logprobs == cold.logprobs
    for checked in story.checked:
        assert checked.records > 100
        assert checked.index_was_right


def test_another_models_records_are_not_used(story: Story) -> None:
    first, second = story.of_another_model
    assert first.tiers["computed"] == PROMPT_TOKENS
    assert second.tokens == first.tokens
