"""The prefix cache's disk tier over two ranks, each of which has the pages of its heads in a part of its own: prefixes
come back with the bits that one process computed, also after a restart. What happens to one rank's disk changes what is
computed again, on both ranks alike, and no answer.

Pages that one rank has not are computed by all: so every answer here shows that the ranks' batches were equal, since
ranks that compute different batches end the server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from reference import lora
from reference.cache.records import DAMAGES, placed
from reference.ranks import network
from system.cache.test_faults import (
    BROKEN,
    CACHED_TOKENS,
    FULL,
    PAGE_TOKENS,
    PAGES,
    PROMPT_TOKENS,
    eventually,
    prompt,
    shimmed,
)
from system.conftest import CachedAnswer, CachedServer, StartCachedServer
from system.ranks.two_hosts import end_by, pair, ready

from kt_runtime.cache import inspection
from kt_runtime.cache.directory import parts_of_ranks
from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.serve.cache_directory import check_directory
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset

PRESET = "tiny-qwen3-moe"
RANKS = ("--tp-size", "2", "--expert-threads", "1")
DAMAGED_PAGE = 5
KEPT = ((0, None), (1, "one"))
"""Prompts whose pages are on the disk when the server ends: of the base and of an adapter."""
DAMAGED = 2
FAULTY = ((10, FULL), (20, BROKEN))
HANGS = 30


@dataclass
class Ranks:
    """A server of two ranks whose disk fails when the test says so."""

    served: CachedServer
    control: Path

    def part(self, rank: int) -> Path:
        return self.served.cache_directory / f"rank-{rank}-of-2"

    def disk(self) -> dict[str, Any]:
        return dict(next(each for each in self.status()["cache"] if each["tier"] == "disk"))

    def disks(self) -> list[dict[str, Any]]:
        """Of each rank, as it was at most a second ago."""
        return [each["disk"] for each in self.status()["ranks"]]

    def status(self) -> dict[str, Any]:
        return dict(self.served.api.get("/kt/status"))

    def store(self, seed: int, name: str | None = None) -> CachedAnswer:
        """The answer, computed, to a prompt whose pages are on both disks afterwards."""
        before = [inspection.statistics(self.part(rank)).records for rank in (0, 1)]
        answer = self.served.ask(prompt(seed), name)
        assert answer.tiers["computed"] == PROMPT_TOKENS
        eventually(
            lambda: all(inspection.statistics(self.part(rank)).records >= before[rank] + PAGES for rank in (0, 1))
        )
        return answer

    def ask(self, seed: int, name: str | None = None) -> CachedAnswer:
        """From the disk, as far as it can be."""
        self.served.flush_memory()
        return self.served.ask(prompt(seed), name)

    def fault(self, rank: int, what: dict[str, Any]) -> None:
        temporary = self.control.with_suffix(".new")
        temporary.write_text(json.dumps({"directory": str(self.part(rank)), **what}), encoding="utf-8")
        os.replace(temporary, self.control)

    def heal(self) -> None:
        self.control.unlink(missing_ok=True)
        eventually(lambda: self.disk()["reading_stopped"] is None and self.disk()["writing_stopped"] is None)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, cached_server: StartCachedServer) -> dict[int, CachedAnswer]:
    """What one process computes."""
    directory = tmp_path_factory.mktemp("one")
    seeds = dict.fromkeys((DAMAGED, *(seed for seed, _ in FAULTY))) | dict(KEPT)
    with cached_server(PRESET, directory, disk="0", options=RANKS[2:]) as served:
        load_adapter(served)
        return {seed: served.ask(prompt(seed), name) for seed, name in seeds.items()}


def load_adapter(served: CachedServer) -> None:
    config = load_preset(PRESET).config
    adapter = lora.write_adapter(served.place / "adapter", lora.random_adapter(config, rank=8, alpha=12.0, seed=1))
    served.api.post("/kt/adapters", {"name": "one", "path": str(adapter)})


@contextmanager
def two_ranks(
    directory: Path, cached_server: StartCachedServer, *, preset: str = PRESET, is_patient: bool = True
) -> Iterator[Ranks]:
    control = directory / "faults.json"
    with shimmed(control, is_patient=is_patient), cached_server(preset, directory, options=RANKS) as served:
        yield Ranks(served, control)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def stored(directory: Path, cached_server: StartCachedServer, expected: dict[int, CachedAnswer]) -> list[bytes]:
    """A server's directory with the pages of `KEPT` and `DAMAGED`, whose keys these are."""
    with two_ranks(directory, cached_server) as ranks:
        load_adapter(ranks.served)
        for seed, name in (*KEPT, (DAMAGED, None)):
            known = {each.header.key for each in placed(ranks.part(1))} if seed == DAMAGED else set()
            assert same(ranks.store(seed, name), expected[seed])
            keys = [each.header.key for each in placed(ranks.part(1)) if each.header.key not in known]
            found = ranks.ask(seed, name)
            assert same(found, expected[seed])
            assert found.tiers["disk"] == CACHED_TOKENS
        for seed, fault in FAULTY:
            a_disk_of_one_rank_fails(ranks, seed, fault, expected[seed])
        assert_said_once(ranks)
    return keys[:PAGES]


def same(found: CachedAnswer, expected: CachedAnswer) -> bool:
    return (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


def a_disk_of_one_rank_fails(ranks: Ranks, seed: int, fault: dict[str, Any], expected: CachedAnswer) -> None:
    """Rank 1's: its pages are not written, or can't be read; those of rank 0 alone are of no use."""
    if fault is BROKEN:
        ranks.store(seed)
    before = inspection.statistics(ranks.part(0)).records
    ranks.fault(1, fault)
    which = "reading_stopped" if fault is BROKEN else "writing_stopped"

    def has_stopped() -> bool:
        assert same(ranks.ask(seed), expected)
        return ranks.disk()[which] is not None

    eventually(has_stopped)
    found = ranks.ask(seed)
    assert same(found, expected)
    assert found.tiers["computed"] == PROMPT_TOKENS
    eventually(lambda: inspection.statistics(ranks.part(0)).records >= before + PAGES * (fault is FULL))
    assert ranks.disk()[which].startswith("rank 1: ")
    assert [each[which] is None for each in ranks.disks()] == [True, False]
    ranks.heal()
    eventually(lambda: ranks.ask(seed).tiers["disk"] == CACHED_TOKENS)
    assert same(ranks.ask(seed), expected)


def assert_said_once(ranks: Ranks) -> None:
    """Pages and bytes are rank 0's, in the status and in the metrics, what has gone wrong is that of all ranks."""
    eventually(lambda: ranks.disks()[0]["hits"] == ranks.disk()["hits"])
    both, disks = ranks.disk(), ranks.disks()
    assert both["directory"] == str(ranks.served.cache_directory)
    assert [each["directory"] for each in disks] == [str(ranks.part(0)), str(ranks.part(1))]
    assert both["pages"] == disks[0]["pages"] == inspection.statistics(ranks.part(0)).records
    assert both["capacity_bytes"] == disks[0]["capacity_bytes"] == disks[1]["capacity_bytes"] == 32 << 20
    assert both["counters"]["read_errors"] == disks[1]["counters"]["read_errors"] > 0
    assert disks[0]["counters"]["read_errors"] == 0

    def published(name: str) -> float:
        text = httpx.get(f"{ranks.served.api.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(f"kt_runtime:cache_{name}")]
        return float(lines[0].rsplit(" ", 1)[1])

    eventually(lambda: published("disk_hits_total") == ranks.disk()["hits"])
    assert published("disk_read_errors_total") == both["counters"]["read_errors"]
    assert published("disk_readable") == published("disk_writable") == 1


def test_after_a_restart_both_ranks_find_their_pages_and_compute_what_one_has_damaged(
    directory: Path, stored: list[bytes], cached_server: StartCachedServer, expected: dict[int, CachedAnswer]
) -> None:
    records = {each.header.key: each for each in placed(directory / "cache" / "rank-1-of-2")}
    DAMAGES["a bit flipped"]([records[key] for key in stored], DAMAGED_PAGE)
    with two_ranks(directory, cached_server) as ranks:
        for seed, name in KEPT:
            found = ranks.ask(seed, name)
            assert same(found, expected[seed])
            assert found.tiers["disk"] == CACHED_TOKENS
        found = ranks.ask(DAMAGED)
        assert same(found, expected[DAMAGED])
        assert found.tiers["disk"] == DAMAGED_PAGE * PAGE_TOKENS
        assert found.tiers["computed"] == PROMPT_TOKENS - DAMAGED_PAGE * PAGE_TOKENS
        eventually(lambda: [each["corrupt"] for each in ranks.disks()] == [0, 1])
        assert ranks.disk()["corrupt"] == 1
        assert len(inspection.statistics(directory / "cache").quarantined) == 1
        eventually(lambda: ranks.ask(DAMAGED).tiers["disk"] == CACHED_TOKENS)  # it was written anew
        assert same(ranks.ask(DAMAGED), expected[DAMAGED])
        with pytest.raises(ConflictError, match=r"rank-0-of-2/lock: .* in use by process .*--cache-read-only"):
            check_directory(directory / "cache", 1 << 20, read_only=False, ranks=(0, 1), num_ranks=2)
        with pytest.raises(InvalidValueError, match="holds pages of 2 ranks, and this server has one rank"):
            check_directory(directory / "cache", 1 << 20, read_only=False)
        assert ranks.served.api.post("/kt/cache/clear", {})["cleared"]["disk"] > 0
        assert inspection.statistics(directory / "cache").records == 0
        assert same(ranks.store(0), expected[0])


def test_a_disk_that_hangs_on_one_rank_holds_nobody_up(tmp_path: Path, cached_server: StartCachedServer) -> None:
    """Of a model with latent attention, whose pages are the same on all ranks: each has them on its own disk."""
    with two_ranks(tmp_path, cached_server, preset="tiny-deepseek-v3", is_patient=False) as ranks:
        computed = ranks.store(HANGS)
        assert inspection.statistics(ranks.part(0)).slot_bytes == inspection.statistics(ranks.part(1)).slot_bytes
        eventually(lambda: ranks.ask(HANGS).tiers["disk"] == CACHED_TOKENS)  # a busy machine looks like a slow disk
        ranks.served.flush_memory()
        ranks.fault(1, {"hang": ["read"]})
        found = ranks.served.ask(prompt(HANGS))
        assert same(found, computed)
        assert found.tiers["computed"] == PROMPT_TOKENS
        eventually(lambda: str(ranks.disk()["reading_stopped"]).startswith("rank 1: "))
        assert same(ranks.ask(HANGS), computed)
        ranks.heal()
        eventually(lambda: ranks.ask(HANGS).tiers["disk"] == CACHED_TOKENS)
        assert same(ranks.ask(HANGS), computed)


def test_two_hosts_have_their_ranks_pages_on_their_own_disks(
    tmp_path: Path, ends: tuple[network.End, network.End]
) -> None:
    make_model(PRESET, tmp_path / "model", seed=2)
    options = ("--cache-disk", "8MiB", "--cache-page-tokens", str(PAGE_TOKENS), "--cache-dir", str(tmp_path / "0"))
    answers = []
    for start in ("first", "second"):
        with pair(tmp_path, ends, start, *options, of_host_1=("--cache-dir", str(tmp_path / "1"))) as hosts:
            ready(hosts)
            assert [path.name for path in parts_of_ranks(tmp_path / "0")] == ["rank-0-of-2"]
            assert [path.name for path in parts_of_ranks(tmp_path / "1")] == ["rank-1-of-2"]
            served = CachedServer(hosts.api, PRESET, tmp_path, PAGE_TOKENS, 4096, 8192)
            answers.append(served.ask(prompt(40)))
            if start == "first":
                hosts.hosts[1].process.send_signal(15)  # a host that is asked to end ends all
                assert hosts.wait_for_the_end() == [0, 0]
                assert "host 1 is ready" in hosts.hosts[1].said()
                assert "host 1 ends: the server has ended" in hosts.hosts[1].said()
            else:
                end_by("rank 1 stopped", hosts, ends)
    computed, found = answers
    assert same(found, computed)
    assert computed.tiers["computed"] == PROMPT_TOKENS
    assert found.tiers["disk"] == CACHED_TOKENS
