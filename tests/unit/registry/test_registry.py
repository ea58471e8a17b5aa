"""A registry in a directory and in an object store: what is committed, pulled, refused, and cleaned up."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kt_runtime.errors import AdapterError, ConflictError, InvalidValueError
from kt_runtime.registry import Heartbeat, Manifest, Registry, ServedRevision, open_place
from kt_runtime.registry import place as places
from kt_runtime.registry.registry import KEPT_REVISIONS

BASE, OTHER = "a" * 64, "b" * 64
Open = Callable[..., Registry]
Version = Callable[[int], Path]


def hash_of(seed: int) -> str:
    return hashlib.sha256(str(seed).encode()).hexdigest()


def publish(registry: Registry, version: Version, seed: int, name: str = "bob", after: int = 0) -> Manifest:
    return registry.publish(name, hash_of(seed), version(seed), base=BASE, source="a test", after=after)


def content(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


def test_a_version_is_pulled_as_it_was_published(opened: Open, version: Version, tmp_path: Path) -> None:
    manifest = publish(opened("one"), version, 1)
    other = opened("two")
    assert other.revisions() == {"bob": [1]} and other.manifest("bob", 1) == manifest
    assert (manifest.version, manifest.base, manifest.replica) == (hash_of(1), BASE, "one")
    pulled = other.pull(manifest, tmp_path)
    assert content(pulled) == content(version(1))


def test_each_publication_and_unloading_has_the_next_revision(opened: Open, version: Version) -> None:
    one, two = opened("one"), opened("two")
    found = [publish(one, version, 1), publish(two, version, 2), one.unload("bob", base=BASE), publish(two, version, 1)]
    assert [each.revision for each in found] == [1, 2, 3, 4]
    assert [each.version for each in found] == [hash_of(1), hash_of(2), None, hash_of(1)]
    assert publish(one, version, 1, "alice").revision == 1
    assert one.revisions() == {"bob": [1, 2, 3, 4], "alice": [1]}


def test_a_key_is_created_once_in_every_kind_of_place(opened: Open) -> None:
    one, two = opened("one").place, opened("two").place
    assert one.create("names/a/1.json", b"first") and not two.create("names/a/1.json", b"second")
    assert two.read("names/a/1.json", 100) == b"first"
    two.put("replicas/two.json", b"first")
    two.put("replicas/two.json", b"second")
    assert one.read("replicas/two.json", 100) == b"second" and one.keys("replicas") == ["replicas/two.json"]


@pytest.mark.slow
def test_publishers_of_one_name_at_once_get_revisions_in_one_order_in_every_kind_of_place(
    opened: Open, version: Version
) -> None:
    paths = {seed: version(seed) for seed in range(8)}

    def of(number: int) -> list[Manifest]:
        registry, seeds = opened(f"replica-{number}"), range(4 * number, 4 * number + 4)
        return [registry.publish("bob", hash_of(seed), paths[seed], base=BASE, source="a test") for seed in seeds]

    with ThreadPoolExecutor(2) as pool:
        found = [manifest for manifests in pool.map(of, range(2)) for manifest in manifests]
    assert sorted(each.revision for each in found) == list(range(1, 9))
    for manifest in found:
        there = opened("reader").manifest("bob", manifest.revision)
        assert (there.version, there.replica) == (manifest.version, manifest.replica)


def test_a_revision_is_above_every_one_that_the_publisher_has_seen(opened: Open, version: Version) -> None:
    """The newest manifests are gone, as after restoring an old copy of the disk."""
    one = opened("one")
    assert publish(one, version, 1, after=7).revision == 8


@pytest.mark.slow
def test_old_revisions_and_their_files_are_removed_and_newer_ones_stay(opened: Open, version: Version) -> None:
    one = opened("one", kept=3)
    manifests = [publish(one, version, seed) for seed in range(6)]
    assert one.revisions() == {"bob": [4, 5, 6]}
    left = {key.removeprefix("data/").rpartition("/")[0] for key in one.place.keys("data")}
    assert left == {each.data for each in manifests[3:]}


@pytest.mark.slow
def test_a_number_that_was_taken_and_removed_before_is_not_taken_again(
    opened: Open, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher that slept between its look and its commit, while many others published."""
    late, other = opened("late", kept=2), opened("other", kept=2)
    create = late.place.create

    def create_late(key: str, data: bytes) -> bool:
        monkeypatch.setattr(late.place, "create", create)
        for seed in range(5):
            publish(other, version, seed)
        return create(key, data)

    monkeypatch.setattr(late.place, "create", create_late)
    assert publish(late, version, 9).revision == 6
    assert other.revisions()["bob"] == [5, 6]


def test_the_first_replica_says_which_weights_a_registry_is_for(opened: Open) -> None:
    base = opened("one").join(BASE, "model", {"hidden_size": 64})
    assert opened("two").join(BASE, "model", {}) == base == opened("three").base()
    with pytest.raises(ConflictError, match=f"other weights: fingerprint {BASE} .* this server has {OTHER}"):
        opened("two").join(OTHER, "another", {})


@pytest.mark.parametrize("damage", ["cut off", "other bytes", "gone"])
def test_files_that_are_not_the_manifest_s_are_refused(
    opened: Open, version: Version, tmp_path: Path, damage: str
) -> None:
    one, target = opened("one"), tmp_path / "target"
    target.mkdir()
    manifest = publish(one, version, 1)
    key = f"data/{manifest.data}/adapter_model.safetensors"
    whole = one.place.read(key, 1 << 30)
    if damage == "gone":
        one.place.remove(key)
    else:
        one.place.put(key, whole[:-1] if damage == "cut off" else whole[:-1] + b"x")
    with pytest.raises(OSError if damage == "gone" else AdapterError) as refused:
        one.pull(manifest, target)
    assert not list(target.iterdir())
    if damage == "other bytes":
        wanted = next(file.sha256 for file in manifest.files if file.name == "adapter_model.safetensors")
        assert wanted in str(refused.value) and hashlib.sha256(whole[:-1] + b"x").hexdigest() in str(refused.value)


def manifest_fields(**changes: object) -> dict[str, object]:
    fields: dict[str, object] = {
        "format": 1,
        "name": "bob",
        "revision": 1,
        "version": hash_of(1),
        "base": BASE,
        "replica": "one",
        "data": f"one/{'0' * 16}-{'1' * 16}",
        "files": [{"name": "a", "size": 1, "sha256": BASE}],
    }
    return fields | changes


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(manifest_fields())[:-20],
        "",
        "[]",
        "\0" * 100,
        json.dumps(manifest_fields(format=2)),
        json.dumps(manifest_fields(name="alice")),
        json.dumps(manifest_fields(revision=2)),
        json.dumps(manifest_fields(revision=True)),
        json.dumps(manifest_fields(version="x")),
        json.dumps(manifest_fields(data="../../etc")),
        json.dumps(manifest_fields(files=[{"name": "../a", "size": 1, "sha256": BASE}])),
        json.dumps(manifest_fields(files=[{"name": ".", "size": 1, "sha256": BASE}])),
        json.dumps(manifest_fields(files=[{"name": "a", "size": 1, "sha256": BASE}] * 2)),
        json.dumps(manifest_fields(files=[])),
        json.dumps(manifest_fields(version=None)),
    ],
)
def test_a_manifest_that_is_not_whole_is_refused(opened: Open, text: str) -> None:
    one = opened("one")
    one.place.put("names/bob/00000001.json", text.encode())
    assert one.revisions() == {"bob": [1]}
    with pytest.raises(InvalidValueError, match=r"names/bob/00000001\.json"):
        one.manifest("bob", 1)
    one.place.put("names/bob/00000001.json", json.dumps(manifest_fields()).encode())
    assert one.manifest("bob", 1).version == hash_of(1)


def test_other_files_among_the_names_are_no_revisions(opened: Open, version: Version) -> None:
    one = opened("one")
    publish(one, version, 1)
    for key in ("names/x.json", "names/bob/7.json", "names/bob/00000009.json.part", "names/bob/a/00000009.json"):
        one.place.put(key, b"{}")
    assert one.revisions() == {"bob": [1]}


def test_heartbeats_are_read_and_a_damaged_one_is_skipped(opened: Open) -> None:
    one, two = opened("one"), opened("two")
    beats = {}
    for registry in (one, two):
        beat = Heartbeat(
            replica=registry.replica, beat=1, url="http://x", written_at=1.5, names={"bob": ServedRevision(revision=3)}
        )
        registry.beat(beat)
        beats[registry.replica] = beat
    one.place.put("replicas/three.json", b'{"replica": "thr')
    one.place.put("replicas/four.json", one.place.read("replicas/one.json", 1000))
    assert two.replicas() == beats
    two.leave("one")
    two.leave("never was")
    assert list(one.replicas()) == ["two"]


def test_a_full_disk_ends_a_publication_and_leaves_nothing(
    tmp_path: Path, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "registry"
    root.mkdir()
    registry = Registry(open_place(str(root), "one"), "one")
    publish(registry, version, 1)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = registry.place.keys("")
    with monkeypatch.context() as patch:
        patch.setattr(places.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            publish(registry, version, 2)
    assert registry.place.keys("") == before and registry.revisions() == {"bob": [1]}
    assert publish(registry, version, 2).revision == 2


def test_a_file_that_can_not_be_written_ends_the_publication_once_no_other_is_being_written(
    opened: Open, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are written at once: the one that goes on longer must not appear after the others were removed."""
    one, failed = opened("one"), threading.Event()
    upload, names = one.place.upload, sorted(path.name for path in version(1).iterdir())
    assert len(names) > 1

    def uploaded(key: str, source: Path) -> tuple[int, str]:
        if source.name == names[0]:
            failed.set()
            raise OSError(errno.EIO, "the store does not answer")
        assert failed.wait(60)
        return upload(key, source)

    with monkeypatch.context() as patch:
        patch.setattr(one.place, "upload", uploaded)
        with pytest.raises(OSError, match="does not answer"):
            publish(one, version, 1)
    assert one.place.keys("data") == [] and one.revisions() == {}


def test_what_failed_between_files_and_manifest_is_removed_by_the_next_publication(
    opened: Open, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = opened("one")

    def fails(key: str, data: bytes) -> bool:
        raise OSError(errno.EIO, "the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(one.place, "create", fails)
        with pytest.raises(OSError, match="does not answer"):
            publish(one, version, 1)
    assert one.revisions() == {} and one.place.keys("data")
    manifest = publish(one, version, 1)
    assert {key.rpartition("/")[0] for key in one.place.keys("data")} == {f"data/{manifest.data}"}


def test_after_an_error_behind_the_commit_publishing_again_loses_nothing(
    opened: Open, version: Version, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = opened("one")
    create, keys = one.place.create, one.place.keys

    def fails(prefix: str) -> list[str]:
        raise OSError(errno.EIO, "the store does not answer")

    def created(key: str, data: bytes) -> bool:
        monkeypatch.setattr(one.place, "keys", fails)
        return create(key, data)

    monkeypatch.setattr(one.place, "create", created)
    with pytest.raises(OSError, match="does not answer"):
        publish(one, version, 1)
    monkeypatch.setattr(one.place, "keys", keys)
    monkeypatch.setattr(one.place, "create", create)
    assert publish(one, version, 1).revision == 2
    for revision in (1, 2):
        assert content(one.pull(one.manifest("bob", revision), tmp_path)) == content(version(1))


def test_what_went_into_another_directory_in_the_registry_s_place_is_not_published(
    tmp_path: Path, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that goes while a publisher writes: the rest lands below its point."""
    root = tmp_path / "registry"
    root.mkdir()
    one = Registry(open_place(str(root), "one"), "one")
    one.join(BASE, "model", {})
    create = one.place.create

    def create_elsewhere(key: str, data: bytes) -> bool:
        root.rename(tmp_path / "elsewhere")
        root.mkdir()
        return create(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(one.place, "create", create_elsewhere)
        with pytest.raises(ConflictError, match="was replaced while this was published"):
            publish(one, version, 1)
    root.rename(tmp_path / "below")
    (tmp_path / "elsewhere").rename(root)
    assert one.revisions() == {} and publish(one, version, 1).revision == 1


def publish_and_die(root: str, directory: str, before: str) -> None:
    """The process is killed before its call of `before`: `create` of the manifest, or the second `upload`, when one
    file is there."""
    registry = Registry(open_place(root, "killed"), "killed")
    calls, is_there = itertools.count(1), threading.Event()
    original = getattr(registry.place, before)

    def die(*arguments: object) -> object:
        if before == "create" or (next(calls) == 2 and is_there.wait(60)):
            os.kill(os.getpid(), signal.SIGKILL)
        found = original(*arguments)
        is_there.set()
        return found

    setattr(registry.place, before, die)
    registry.publish("bob", hash_of(2), Path(directory), base=BASE)


@pytest.mark.parametrize("before", ["create", "upload"])
def test_a_publisher_killed_before_its_manifest_changes_nothing(tmp_path: Path, version: Version, before: str) -> None:
    root = tmp_path / "registry"
    root.mkdir()
    one = Registry(open_place(str(root), "one"), "one")
    first = publish(one, version, 1)
    (root / "unfinished" / "killed").mkdir(parents=True)
    (root / "unfinished" / "killed" / "half").write_text("half")
    process = multiprocessing.get_context("fork").Process(
        target=publish_and_die, args=(str(root), str(version(2)), before)
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert one.revisions() == {"bob": [1]} and one.place.keys("data/killed")
    back = Registry(open_place(str(root), "killed"), "killed")
    back.clear_unfinished()
    assert not one.place.keys("data/killed") and not one.place.keys("unfinished/killed")
    assert content(one.pull(first, tmp_path)) == content(version(1))
    assert publish(back, version, 2).revision == 2
    back.clear_unfinished()
    assert content(one.pull(one.manifest("bob", 2), tmp_path)) == content(version(2))


def publish_often(root: str, replica: str, directories: list[str]) -> None:
    registry = Registry(open_place(root, replica), replica, kept=1000)
    for number, directory in enumerate(directories):
        registry.publish("bob", hash_of(number), Path(directory), base=BASE, source=replica)


@pytest.mark.slow
def test_publishers_of_one_name_get_revisions_in_one_order_and_nothing_is_mixed(tmp_path: Path) -> None:
    """Three real processes, which publish as fast as they can."""
    root = tmp_path / "registry"
    root.mkdir()
    each, contexts = 20, multiprocessing.get_context("fork")
    running = []
    for replica in ("one", "two", "three"):
        directories = []
        for number in range(each):
            path = tmp_path / f"{replica}-{number}"
            path.mkdir()
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                (path / file).write_text(f"{replica} {number}")
            directories.append(str(path))
        running.append(contexts.Process(target=publish_often, args=(str(root), replica, directories)))
    for process in running:
        process.start()
    for process in running:
        process.join(300)
        assert process.exitcode == 0
    reader = Registry(open_place(str(root), "reader"), "reader")
    assert reader.revisions() == {"bob": list(range(1, 3 * each + 1))}
    order: dict[str, list[int]] = {"one": [], "two": [], "three": []}
    for revision in range(1, 3 * each + 1):
        manifest = reader.manifest("bob", revision)
        (text,) = set(content(reader.pull(manifest, tmp_path)).values())
        publisher, its_number = text.decode().split()
        assert (manifest.replica, manifest.version) == (publisher, hash_of(int(its_number)))
        order[publisher].append(int(its_number))
    assert all(numbers == list(range(each)) for numbers in order.values())
    assert not reader.place.keys("unfinished")


def test_a_directory_that_has_gone_is_an_error_and_is_not_made_again(tmp_path: Path, version: Version) -> None:
    root = tmp_path / "registry"
    root.mkdir()
    one = Registry(open_place(str(root), "one"), "one")
    one.join(BASE, "model", {})
    root.rename(tmp_path / "elsewhere")
    for call in (one.revisions, lambda: publish(one, version, 1), lambda: one.unload("bob", base=BASE), one.replicas):
        with pytest.raises(OSError):
            call()
    assert one.base() is None and not root.exists()
    (tmp_path / "elsewhere").rename(root)
    assert publish(one, version, 1).revision == 1


def test_a_registry_keeps_at_least_two_revisions(tmp_path: Path) -> None:
    assert KEPT_REVISIONS >= 2
    with pytest.raises(InvalidValueError, match="kept revisions: 1"):
        Registry(open_place(str(tmp_path), "one"), "one", kept=1)
