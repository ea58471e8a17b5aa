"""Versions reach the disk in the end; what does not is told and bounded. The disk: a store that refuses on purpose."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_runtime.adapters import AdapterTensors, AdapterVersion, VersionStore, VersionTable, content_hash
from kt_runtime.errors import AdapterError
from kt_runtime.families import resolve_targets
from kt_runtime.resident.publishing import persistence as module
from kt_runtime.resident.publishing.persistence import WRITING, Persistence


class Disk:
    """A real store whose methods raise `error`, or wait at `gate`. `save_error`: of `save` alone."""

    def __init__(self, store: VersionStore) -> None:
        self.store = store
        self.error: Exception | None = None
        self.save_error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.attempts = 0

    def save(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse()
        if self.save_error is not None:
            raise self.save_error
        return self.store.save(*args, **kwargs)

    def point(self, name: str, served: list[str], known: Collection[str] = ()) -> None:
        self._refuse()
        self.store.point(name, served, known)

    def forget(self, name: str) -> None:
        self._refuse()
        self.store.forget(name)

    def _refuse(self) -> None:
        self.attempts += 1
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error


class Desk:
    def __init__(self, host: Any, family: Any, root: Path, **limits: Any) -> None:
        self.host = host
        self.disk = Disk(VersionStore(root, family, host.config, host.max_lora_rank))
        self.table = VersionTable(8)
        self.persistence = Persistence(self.disk, "m", **limits)  # type: ignore[arg-type]

    @property
    def store(self) -> VersionStore:
        return self.disk.store

    def adapter(self, number: float) -> AdapterTensors:
        modules = resolve_targets(self.host.config, ["o_proj"])
        pairs = {m.name: (torch.full((2, m.in_features), number), torch.ones(m.out_features, 2)) for m in modules}
        return AdapterTensors.from_modules(2, 4.0, pairs)

    def put(self, name: str, number: float, **given: bool) -> AdapterVersion:
        adapter = self.adapter(number)
        version = AdapterVersion(content_hash(adapter), number, 2, 4.0, "test", "id")
        self.table.publish(name, version)
        known = [item.hash for item in self.table.history(name)]
        self.persistence.put(name, version, adapter, self.table.served(name), known, **given)
        return version


@pytest.fixture
def make_desk(deepseek_lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Desk]]:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(module, "LAST_PAUSE_SECONDS", 0.05)
    made: list[Desk] = []

    def make(**limits: Any) -> Desk:
        made.append(Desk(deepseek_lab.host, deepseek_lab.twin.family, tmp_path / "versions", **limits))
        return made[-1]

    yield make
    for desk in made:
        desk.disk.gate.set()
        desk.persistence.close()


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    return make_desk()


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EXDEV])
def test_what_the_disk_refuses_is_told_kept_and_written_when_it_does_not(desk: Desk, number: int) -> None:
    desk.disk.error = OSError(number, os.strerror(number))
    version = desk.put("bob", 1.0)
    eventually(lambda: desk.persistence.reason("bob", version.hash) not in (None, WRITING))
    reason = desk.persistence.reason("bob", version.hash)
    assert os.strerror(number) in str(reason)
    assert [(item.name, item.is_waiting) for item in desk.persistence.unstored()] == [("bob", True)]
    assert desk.persistence.adapter("bob", version.hash) is not None
    eventually(lambda: desk.disk.attempts > 3)  # again and again
    desk.disk.error = None
    assert desk.persistence.flush(60)
    assert desk.persistence.reason("bob", version.hash) is None
    assert desk.persistence.unstored() == []
    assert desk.persistence.adapter("bob", version.hash) is None
    assert desk.store.served("bob") == [version.hash]


def test_every_version_that_waited_is_there_after_a_restart(desk: Desk) -> None:
    desk.disk.error = no_space()
    versions = [desk.put(name, number) for name, number in (("bob", 1.0), ("bob", 2.0), ("alice", 3.0), ("bob", 4.0))]
    eventually(lambda: len(desk.persistence.unstored()) == 4 and desk.disk.attempts > 2)
    desk.disk.error = None
    assert desk.persistence.flush(60)
    assert desk.store.served("bob") == [versions[0].hash, versions[1].hash, versions[3].hash]
    assert desk.store.served("alice") == [versions[2].hash]


def test_a_disk_that_has_room_for_the_pointer_only_later_names_the_version_before(desk: Desk) -> None:
    """Full between a version's directory and current.json."""
    first = desk.put("bob", 1.0)
    assert desk.persistence.flush(60)
    original, desk.disk.point = desk.disk.point, lambda *args: (_ for _ in ()).throw(no_space())  # type: ignore[method-assign]
    second = desk.put("bob", 2.0)
    eventually(lambda: len(desk.store.versions("bob")) == 2)
    assert desk.store.served("bob") == [first.hash]
    assert [item.version for item in desk.persistence.unstored()] == [second.hash]  # a restart would not serve it
    desk.disk.point = original  # type: ignore[method-assign]
    assert desk.persistence.flush(60)
    assert desk.store.served("bob") == [first.hash, second.hash]


def test_beyond_the_bounds_what_each_name_means_is_kept_and_the_rest_is_reported(
    make_desk: Callable[..., Desk],
) -> None:
    desk = make_desk(max_versions=3)
    desk.disk.error = no_space()
    versions = [desk.put("bob", float(number)) for number in range(1, 7)]
    others = [desk.put(name, 1.0) for name in ("alice", "carol", "dora")]
    unstored = desk.persistence.unstored()
    assert {item.name for item in unstored if item.is_waiting} == {"bob", "alice", "carol", "dora"}
    assert sum(item.is_waiting for item in unstored) == 4  # one of each name is more than the bound
    assert desk.persistence.reason("bob", versions[0].hash) is not None
    assert desk.persistence.adapter("bob", versions[0].hash) is None
    desk.disk.error = None
    assert desk.persistence.flush(60)
    assert desk.store.served("bob") == [versions[-1].hash]
    assert desk.store.served("dora") == [others[-1].hash]
    given_up = [item for item in desk.persistence.unstored() if item.name == "bob"]
    assert {item.version for item in given_up} == {version.hash for version in versions[:-1]}
    assert all("waited to be written" in item.reason and not item.is_waiting for item in given_up)


@pytest.mark.slow
def test_a_hundred_publications_in_quick_succession_take_bounded_memory(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk(max_versions=5, max_bytes=3 * 10**6)
    desk.disk.gate.clear()
    for number in range(100):
        version = desk.put("bob", float(number))
        waiting = [item for item in desk.persistence.unstored() if item.is_waiting]
        assert len(waiting) <= 5
    desk.disk.gate.set()
    assert desk.persistence.flush(60)
    assert desk.store.served("bob")[-1] == version.hash
    assert len(desk.store.versions("bob")) <= 8


def test_bytes_are_bounded_too(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk()
    size = desk.adapter(0.0).num_bytes
    desk.persistence._max_bytes = 2 * size
    desk.disk.error = no_space()
    for number in range(5):
        desk.put("bob", float(number))
    assert sum(item.is_waiting for item in desk.persistence.unstored()) == 2


def test_a_name_that_is_forgotten_while_it_waits_stays_forgotten_and_its_versions_are_written(desk: Desk) -> None:
    desk.disk.error = no_space()
    version = desk.put("bob", 1.0)
    desk.persistence.forget("bob")
    desk.disk.error = None
    assert desk.persistence.flush(60)
    assert desk.store.names() == []
    assert [item.hash for item in desk.store.versions("bob")] == [version.hash]


def test_a_forgotten_names_versions_are_the_first_to_be_given_up(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk(max_versions=2)
    desk.disk.error = no_space()
    gone = desk.put("gone", 9.0)
    desk.persistence.forget("gone")
    first, second = desk.put("bob", 1.0), desk.put("bob", 2.0)
    assert desk.persistence.adapter("gone", gone.hash) is None
    assert all(desk.persistence.adapter("bob", item.hash) is not None for item in (first, second))


def test_another_name_is_written_while_one_is_refused(desk: Desk) -> None:
    original = desk.disk.save

    def save(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "bob":
            raise no_space()
        return original(name, *args, **kwargs)

    desk.disk.save = save  # type: ignore[method-assign]
    desk.put("bob", 1.0)
    version = desk.put("alice", 2.0)
    eventually(lambda: desk.persistence.reason("alice", version.hash) is None)
    assert desk.store.served("alice") == [version.hash]


def test_what_no_repetition_mends_is_reported_and_not_kept(desk: Desk) -> None:
    desk.disk.error = AdapterError("not a version's description")
    version = desk.put("bob", 1.0)
    assert desk.persistence.flush(60)
    assert desk.persistence.reason("bob", version.hash) == "AdapterError: not a version's description"
    assert desk.persistence.adapter("bob", version.hash) is None


def test_the_end_writes_what_it_can_and_reports_the_rest(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.disk.gate.clear()
    first = desk.put("bob", 1.0)
    eventually(lambda: desk.disk.attempts)
    second = desk.put("alice", 2.0)
    desk.disk.gate.set()
    desk.persistence.close()
    assert desk.store.served("bob") == [first.hash] and desk.store.served("alice") == [second.hash]


def test_the_end_reports_what_the_disk_still_refuses(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.disk.error = no_space()
    version = desk.put("bob", 1.0)
    desk.persistence.close()
    assert f"adapter bob, version {version.hash[:16]} is not stored: No space left on device" in caplog.text


def test_files_and_directories_are_their_owners_alone(desk: Desk) -> None:
    desk.put("bob", 1.0)
    assert desk.persistence.flush(60)
    paths = [desk.store.root, *desk.store.root.rglob("*")]
    assert len(paths) > 5
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}


def test_a_name_stays_forgotten_though_the_disk_has_no_room_for_its_versions(desk: Desk) -> None:
    desk.put("a", 1.0)
    assert desk.persistence.flush(30)
    desk.disk.save_error = no_space()
    desk.put("a", 2.0)
    desk.persistence.forget("a")
    eventually(
        lambda: [item.reason for item in desk.persistence.unstored()] == ["No space left on device (tried again)"]
    )
    eventually(lambda: desk.store.names() == [])
    eventually(lambda: desk.persistence.unforgotten() == [])  # it is forgotten; its versions wait
    desk.disk.save_error = None
    assert desk.persistence.flush(30)
    assert len(desk.store.versions("a")) == 2
    assert desk.store.names() == []


def test_a_name_that_could_not_be_forgotten_is_told_until_it_is(desk: Desk) -> None:
    """A restart would serve it again."""
    desk.put("a", 1.0)
    assert desk.persistence.flush(30)
    desk.disk.error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    desk.persistence.forget("a")
    eventually(lambda: desk.persistence.unforgotten() == [("a", "Read-only file system (tried again)")])
    assert desk.persistence.unstored() == [] and desk.store.names() == ["a"]
    desk.disk.error = None
    assert desk.persistence.flush(30)
    assert desk.persistence.unforgotten() == [] and desk.store.names() == []


def test_content_that_is_published_once_more_is_kept_as_long_as_the_table_knows_it(desk: Desk) -> None:
    first = desk.put("a", 1.0)
    for number in range(2, 9):
        desk.put("a", float(number))
    desk.put("a", 1.0)
    assert desk.persistence.flush(30)
    desk.put("a", 9.0)
    assert desk.persistence.flush(30)
    known = {version.hash for version in desk.table.history("a")}
    assert first.hash in known and desk.table.rollback_target("a").hash == first.hash
    assert {version.hash for version in desk.store.versions("a")} == known


def test_with_other_servers_waiting_a_version_is_written_at_once(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DELAY_SECONDS", 3600.0)
    desk = make_desk(at_once=True)
    version = desk.put("bob", 1.0)
    assert desk.persistence.flush(60) and desk.store.served("bob") == [version.hash]


def test_a_version_that_another_server_has_waits_also_where_others_wait_for_versions(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DELAY_SECONDS", 3600.0)
    desk = make_desk(at_once=True)
    desk.put("followed", 1.0, is_elsewhere=True)
    own = desk.put("bob", 2.0)
    eventually(lambda: "bob" in desk.store.names())
    assert desk.store.served("bob") == [own.hash]
    eventually(lambda: [item.name for item in desk.persistence.unstored()] == ["followed"])
