from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_runtime.adapters import VersionStore, VersionTable, complete_groups, content_hash, version_store, versions
from kt_runtime.errors import AdapterError, InvalidValueError, UnknownNameError


def open_store(model: Any, root: Path, kept: int = 8) -> VersionStore:
    return VersionStore(root, model.family, model.config, max_rank=8, kept=kept)


def test_a_version_is_loaded_bit_for_bit_under_its_hash(tmp_path: Path, model: Any) -> None:
    store, adapter = open_store(model, tmp_path / "versions"), model.adapter("o_proj", "gate_proj", rank=3, alpha=0.7)
    version = store.save("x", adapter, created=5.0, source="test", base_model="tiny")
    again = open_store(model, tmp_path / "versions").load("x", version.hash)
    assert content_hash(again) == version.hash == content_hash(complete_groups(adapter, model.family, model.config))
    assert store.versions("x") == [version]
    assert (version.created, version.source, version.rank, version.alpha) == (5.0, "test", 3, 0.7)


def test_bfloat16_and_mixed_dtypes_keep_their_numbers(tmp_path: Path, qwen: Any) -> None:
    adapter, store = qwen.adapter("o_proj"), open_store(qwen, tmp_path)
    name, (a, b) = next(iter(adapter.modules.items()))
    for pairs in (
        {name: (a.bfloat16(), b.bfloat16())},
        {**adapter.modules, name: (a.bfloat16(), b)},
    ):
        version = store.save("x", type(adapter).from_modules(4, 8.0, pairs), created=0.0)
        assert torch.equal(store.load("x", version.hash).modules[name].a.float(), a.bfloat16().float())


def test_saving_the_same_content_again_writes_nothing(tmp_path: Path, qwen: Any) -> None:
    store = open_store(qwen, tmp_path)
    first = store.save("x", qwen.adapter("o_proj"), created=1.0, source="first")
    assert store.save("x", qwen.adapter("o_proj"), created=2.0, source="second") == first


def test_a_version_under_the_first_form_of_its_hash_is_loaded_under_that_name(tmp_path: Path, qwen: Any) -> None:
    """Its directory is named after another hash of the same content."""
    store, adapter = open_store(qwen, tmp_path), qwen.adapter("o_proj", "experts", rank=3)
    earlier = versions._first_content_hash(complete_groups(adapter, qwen.family, qwen.config))
    assert store.save("x", adapter, created=5.0, version_hash=earlier).hash == earlier
    store.point("x", [earlier])
    assert store.served("x") == [version.hash for version in store.versions("x")] == [earlier]
    assert content_hash(store.load("x", earlier)) == content_hash(adapter) != earlier
    path = tmp_path / "x" / earlier / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)
    with pytest.raises(AdapterError, match="it was changed after it was published"):
        store.load("x", earlier)


def test_a_name_means_nothing_until_it_points_and_then_survives_a_restart(tmp_path: Path, qwen: Any) -> None:
    store, table = open_store(qwen, tmp_path), VersionTable()
    for seed in range(3):
        table.publish("x", store.save("x", qwen.adapter("o_proj", seed=seed), created=float(seed)))
        if seed == 0:
            assert store.names() == []
        store.point("x", table.served("x"))
    table.rollback("x")
    store.point("x", table.served("x"))
    again, restored = open_store(qwen, tmp_path), VersionTable()
    assert again.names() == ["x"]
    restored.restore("x", again.versions("x"), again.served("x"))
    assert restored.current("x").hash == table.current("x").hash
    assert restored.rollback("x").created == 0.0


def test_only_the_newest_versions_and_the_current_one_are_kept(tmp_path: Path, qwen: Any) -> None:
    store = open_store(qwen, tmp_path, kept=2)
    versions = [store.save("x", qwen.adapter("o_proj", seed=seed), created=float(seed)) for seed in range(4)]
    store.point("x", [versions[0].hash])
    assert [version.created for version in store.versions("x")] == [0.0, 3.0]
    with pytest.raises(UnknownNameError, match=f"adapter 'x': unknown version '{versions[1].hash}'"):
        store.load("x", versions[1].hash)


def test_temporary_entries_and_foreign_files_are_not_listed(tmp_path: Path, qwen: Any) -> None:
    store = open_store(qwen, tmp_path)
    version = store.save("x", qwen.adapter("o_proj"), created=0.0)
    store.point("x", [version.hash])
    for path in (tmp_path / ".tmp-a", tmp_path / "x" / ".tmp-b", tmp_path / "x" / "notes", tmp_path / "y"):
        path.mkdir()
    (tmp_path / "x" / ("0" * 64)).mkdir()
    assert store.names() == ["x"]
    assert store.versions("x") == [version]
    store.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]
    store.load("x", version.hash)


def test_a_version_that_was_tampered_with_is_refused(tmp_path: Path, qwen: Any) -> None:
    store = open_store(qwen, tmp_path)
    version = store.save("x", qwen.adapter("o_proj"), created=0.0)
    path = tmp_path / "x" / version.hash / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)
    with pytest.raises(AdapterError, match="it was changed after it was published"):
        store.load("x", version.hash)


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"format": 2, "served": ["a"]}', '{"format": 1, "served": []}', '{"format": 1, "served": ["a"]}'],
)
def test_a_damaged_pointer_is_refused_by_its_file(tmp_path: Path, qwen: Any, content: str) -> None:
    store = open_store(qwen, tmp_path)
    store.point("x", [store.save("x", qwen.adapter("o_proj"), created=0.0).hash])
    (tmp_path / "x" / "current.json").write_text(content)
    with pytest.raises(AdapterError, match=r"current\.json: "):
        store.served("x")


def test_unknown_names_and_versions_and_paths_are_refused(tmp_path: Path, qwen: Any) -> None:
    store = open_store(qwen, tmp_path)
    with pytest.raises(UnknownNameError, match="unknown adapter 'x'"):
        store.served("x")
    for call in (
        lambda: store.save("../x", qwen.adapter("o_proj"), created=0.0),
        lambda: store.load("..", "0" * 64),
        lambda: store.remove("."),
    ):
        with pytest.raises(InvalidValueError, match="adapter name"):
            call()
    with pytest.raises(UnknownNameError, match=r"unknown version '\.\./\.\./x'"):
        store.load("x", "../../x")
    with pytest.raises(UnknownNameError, match="unknown version"):
        store.point("x", ["0" * 64])


def test_a_root_that_has_gone_is_not_made_again_and_nothing_is_forgotten(tmp_path: Path, qwen: Any) -> None:
    root = tmp_path / "store"
    root.mkdir()
    store = open_store(qwen, root)
    version = store.save("bob", qwen.adapter("o_proj"), created=1.0)
    store.point("bob", [version.hash])
    root.rename(tmp_path / "unplugged")
    for change in (lambda: store.save("bob", qwen.adapter("q_proj"), created=2.0), lambda: store.forget("bob")):
        with pytest.raises(OSError, match="the directory is gone"):
            change()
    assert not root.exists()
    (tmp_path / "unplugged").rename(root)
    assert store.served("bob") == [version.hash]


def test_remove_forgets_a_name(tmp_path: Path, qwen: Any) -> None:
    store = open_store(qwen, tmp_path)
    store.point("x", [store.save("x", qwen.adapter("o_proj"), created=0.0).hash])
    store.remove("x")
    store.remove("x")
    assert store.names() == []
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("unload", ["forget", "remove"])
def test_unloading_is_durable(tmp_path: Path, qwen: Any, unload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory is synced once the entry is gone: a power cut does not bring the name back."""
    store = open_store(qwen, tmp_path)
    store.point("x", [store.save("x", qwen.adapter("o_proj"), created=0.0).hash])
    synced: list[tuple[Path, bool]] = []
    monkeypatch.setattr(
        version_store, "fsync_directory", lambda place: synced.append((place, (place / "current.json").exists()))
    )
    getattr(store, unload)("x")
    assert synced == [(tmp_path / "x", False)]


def publish(store: VersionStore, adapter: Any, created: float, served: list[str]) -> list[str]:
    version = store.save("x", adapter, created=created)
    store.point("x", [*served, version.hash])
    return [*served, version.hash]


def kill_before(number: int) -> None:
    """SIGKILL for this process at the call of that number which makes a change lasting."""
    left = [number]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, counted(getattr(os, name)))


def write_until_killed(root: Path, model: Any, number: int) -> int:
    """In a fork of this process, which has imported PEFT. Returns the status of os.waitpid."""
    writer = os.fork()
    if not writer:
        with contextlib.suppress(BaseException):
            store = open_store(model, root)
            served = publish(store, model.adapter("o_proj", seed=1), 1.0, [])
            kill_before(number)
            publish(store, model.adapter("o_proj", seed=2), 2.0, served)
            os._exit(0)
        os._exit(1)
    return os.waitpid(writer, 0)[1]


@pytest.mark.slow
def test_killing_the_writer_at_any_step_leaves_whole_versions_only(tmp_path: Path, qwen: Any) -> None:
    """Writer n is killed before its n-th fsync, rename or replace; the last one comes through."""
    publish(open_store(qwen, tmp_path / "warm"), qwen.adapter("o_proj"), 1.0, [])  # imports, once for all writers
    steps = 1
    while (status := write_until_killed(tmp_path / str(steps), qwen, steps)) != 0:
        assert status == signal.SIGKILL, status
        steps += 1
    assert steps > 8
    counts = []
    for number in range(1, steps + 1):
        root = tmp_path / str(number)
        store = open_store(qwen, root)
        versions, served = store.versions("x"), store.served("x")
        assert store.names() == ["x"]
        assert versions[0].hash == served[0]
        assert len(served) <= len(versions) <= 2
        for version in versions:
            store.load("x", version.hash)
        counts.append((len(versions), len(served)))
        store.clean()
        assert len(list((root / "x").iterdir())) == len(versions) + 1
    assert counts == sorted(counts)
    assert counts[0] == (1, 1)
    assert counts[-1] == (2, 2)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("version.json", '{"created": 1.0, "rank": 1e999, "alpha": 1.0, "source": ""}'),
        ("version.json", '{"created": 1' + "0" * 400 + ', "rank": 8, "alpha": 1.0, "source": ""}'),
        ("version.json", '{"created": 1.0, "rank": 8, "alpha": 1e999, "source": ""}'),
        ("version.json", '{"created": NaN, "rank": 8, "alpha": 1.0, "source": ""}'),
        ("current.json", '{"format": 1, "served": [{}]}'),
        ("current.json", '{"format": 1, "served": [["x"]]}'),
    ],
)
def test_numbers_and_lists_that_are_damaged_are_one_names_problem(
    tmp_path: Path, qwen: Any, file: str, content: str
) -> None:
    store = open_store(qwen, tmp_path)
    for seed, name in enumerate(("bad", "good")):
        version = store.save(name, qwen.adapter("o_proj", seed=seed), created=1.0)
        store.point(name, [version.hash])
    (described,) = store.root.glob(f"bad/**/{file}")
    described.write_text(content)
    found, problems = store.scan()
    assert found[-1].name == "good" and len(found[-1].versions) == 1
    assert (found[0].name == "bad" and found[0].versions == []) or "'bad' is not served" in problems[0]
