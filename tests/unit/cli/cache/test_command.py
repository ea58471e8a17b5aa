"""The command on real directories; a running server's own part is in tests/system/cache/test_counters.py."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reference.cache.files import page_to_write
from reference.server.fake_server import Answer, fake_server

from kt_runtime.cache.format import FILE_HEADER_BYTES, slot_bytes_for
from kt_runtime.cache.page_store import PageStore
from kt_runtime.wire.status import CacheTier

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the default caches are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "kt-runtime" / "prefix"


def make_cache(path: Path, count: int = 7) -> PageStore:
    store = PageStore(path, 1 << 20, b"n" * 16)
    store.write([page_to_write(number) for number in range(count)])
    return store


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    make_cache(tmp_path / "cache").close()
    return tmp_path / "cache"


@pytest.fixture
def cache_in_use(tmp_path: Path) -> Iterator[Path]:
    store = make_cache(tmp_path / "cache")
    yield tmp_path / "cache"
    store.close()


def damage(path: Path, slot: int) -> None:
    with (path / "segments" / "00000001.seg").open("r+b") as file:
        file.seek(FILE_HEADER_BYTES + slot * slot_bytes_for(4096) + 900)
        file.write(b"\xff\xfe\xfd")


def answer_of(result: subprocess.CompletedProcess[str], status: int = 0) -> Any:
    assert result.returncode == status, result.stderr
    return json.loads(result.stdout)


def test_stat_of_a_directory_that_a_server_uses_says_who(run: Run, cache_in_use: Path) -> None:
    found = answer_of(run("cache", "stat", "--dir", str(cache_in_use), "--json"))
    assert (found["records"], found["slot_bytes"]) == (7, {str(slot_bytes_for(4096)): 7})
    on_disk = sum(file.stat().st_size for file in cache_in_use.rglob("*") if file.name != "lock" and file.is_file())
    assert found["disk_bytes"] == on_disk
    assert found["holder"] == str(os.getpid())
    assert f"process {os.getpid()}" in run("cache", "stat", "--dir", str(cache_in_use)).stdout


def test_verify_of_a_whole_cache_is_status_0(run: Run, cache: Path) -> None:
    assert answer_of(run("cache", "verify", "--dir", str(cache), "--json"))["damaged"] == []
    result = run("cache", "verify", "--dir", str(cache))
    assert result.returncode == 0 and "7 records read" in result.stdout and "all right" in result.stdout


def test_verify_says_what_was_quarantined_and_is_status_1_once(run: Run, cache: Path) -> None:
    damage(cache, 3)
    result = run("cache", "verify", "--dir", str(cache))
    assert result.returncode == 1
    assert "the payload does not match its checksum; kept as " in result.stdout and "1 damaged" in result.stdout
    (kept,) = (cache / "quarantine").iterdir()
    assert str(kept) in result.stdout
    again = answer_of(run("cache", "verify", "--dir", str(cache), "--json"))
    assert (again["records"], again["damaged"], again["index_was_right"]) == (6, [], True)
    assert answer_of(run("cache", "stat", "--dir", str(cache), "--json"))["quarantined"] == [kept.name]


@pytest.mark.parametrize("what", ["verify", "clear"])
def test_a_directory_that_a_server_uses_is_neither_verified_nor_cleared(
    run: Run, cache_in_use: Path, what: str
) -> None:
    result = run("cache", what, "--dir", str(cache_in_use))
    assert result.returncode == 2
    assert f"in use by process {os.getpid()}" in result.stderr and result.stderr.count("\n") == 1
    assert answer_of(run("cache", "stat", "--dir", str(cache_in_use), "--json"))["records"] == 7


def test_clear_empties_a_directory(run: Run, cache: Path) -> None:
    assert answer_of(run("cache", "clear", "--dir", str(cache), "--json"))["cleared"] == {"disk": 7}
    assert answer_of(run("cache", "stat", "--dir", str(cache), "--json"))["records"] == 0
    assert "7 of the disk's" not in run("cache", "clear", "--dir", str(cache)).stdout


@pytest.mark.parametrize("what", ["stat", "verify", "clear"])
def test_what_is_no_cache_is_refused_and_the_nearest_one_named(run: Run, home: Path, cache: Path, what: str) -> None:
    make_cache(home / "tiny-1234").close()
    for wrong in (cache.with_name("cashe"), cache.parent, cache / "index.log"):
        result = run("cache", what, "--dir", str(wrong))
        assert result.returncode == 2 and str(home / "tiny-1234") in result.stderr
        assert wrong.name == "index.log" or str(cache) in result.stderr
    assert "did you mean" in run("cache", what, "--dir", str(cache.with_name("cashe"))).stderr
    assert not cache.with_name("cashe").exists() and not (cache.parent / "segments").exists()


def test_without_a_server_and_a_directory_the_users_caches_are_meant(run: Run, home: Path) -> None:
    empty = run("cache", "stat")
    assert empty.returncode == 0 and f"no cache in {home}" in empty.stdout
    assert run("cache", "verify").returncode == 2
    make_cache(home / "one-1234", 3).close()
    found = answer_of(run("cache", "stat", "--json"))
    assert [(entry["directory"], entry["records"]) for entry in found["caches"]] == [(str(home / "one-1234"), 3)]
    assert answer_of(run("cache", "verify", "--json"))["directory"] == str(home / "one-1234")
    make_cache(home / "two-1234").close()
    assert "one-1234" in (shown := run("cache", "stat").stdout) and "two-1234" in shown
    for what in ("verify", "clear"):  # neither is guessed
        result = run("cache", what)
        assert result.returncode == 2 and str(home / "two-1234") in result.stderr


def test_a_directory_and_a_server_at_once_are_refused(run: Run, cache: Path) -> None:
    for what in ("stat", "clear"):
        result = run("cache", what, "--dir", str(cache), "--url", "http://127.0.0.1:9")
        assert result.returncode == 2 and "not both" in result.stderr


def test_a_named_server_that_is_not_there_is_an_error(run: Run) -> None:
    assert run("cache", "stat", "--url", "http://127.0.0.1:9").returncode == 1


def server_answers(path: str, body: Any, number: int) -> Answer:
    if path == "/kt/cache/clear":
        return 200, {"cleared": {"device": 3, "disk": 5}}
    fields: dict[str, Any] = {"page_tokens": 64, "page_bytes": 1000, "used_bytes": 3000, "capacity_bytes": 9000}
    fields |= {"hits": 3, "misses": 1}
    disk: dict[str, Any] = {"corrupt": 2, "counters": {"dropped": 6}}
    disk |= {"directory": "/the/cache", "writing_stopped": "disk full"}
    tiers = [CacheTier(tier="device", pages=3, evictions=0, **fields)]
    tiers.append(CacheTier(tier="disk", pages=5, evictions=8, **fields, **disk))
    return 200, {"cache": msgspec.to_builtins(tiers)}


def test_stat_of_a_server_shows_its_tiers_and_what_is_wrong(run: Run) -> None:
    with fake_server(server_answers) as fake:
        found = answer_of(run("cache", "stat", "--url", fake.url, "--json"))
        shown = run("cache", "stat", KT_RUNTIME_URL=fake.url).stdout
    assert [tier["tier"] for tier in found["tiers"]] == ["device", "disk"]
    for text in (
        "pages of 64 tokens",
        "75.0%",
        "2.93 KiB",
        "/the/cache",
        "writing has stopped: disk full",
        "dropped 6",
    ):
        assert text in shown


def test_clear_of_a_server_asks_the_server(run: Run) -> None:
    with fake_server(server_answers) as fake:
        assert answer_of(run("cache", "clear", "--url", fake.url, "--json"))["cleared"] == {"device": 3, "disk": 5}
        assert "3 of the device's, 5 of the disk's" in run("cache", "clear", "--url", fake.url).stdout
    assert fake.requests == [("/kt/cache/clear", {})] * 2
