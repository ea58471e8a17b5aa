from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.adapters import AdapterVersion, LoraPair, VersionStore, content_hash
from kt_runtime.errors import AdapterError, ConflictError, NotFoundError, UnknownNameError
from kt_runtime.resident import state
from kt_runtime.resident.publishing import Publisher


class Desk:
    """A publisher over a fake engine, whose moves end when `settle` is called."""

    def __init__(self, lab: Any, root: Path, salt: str = "salt") -> None:
        self.lab, self.host = lab, lab.host
        self.background = ThreadPoolExecutor(max_workers=1)
        self.store = VersionStore(root, lab.twin.family, lab.host.config, lab.host.max_lora_rank, 3)
        self.answers: list[tuple[str, Exception | None]] = []
        self.outcomes: list[AdapterVersion | Exception] = []
        self.publisher = Publisher(
            lab.host, lab.twin.family, self.store, 3, self.background, lambda *answer: self.answers.append(answer)
        )

        self.publisher.start(salt)

    def adapter(self, seed: int) -> Any:
        session = self.lab.session(["attention"], seed=seed)
        adapter = state.masters(session)
        session.close()
        return adapter

    def publish(self, name: str, seed: int) -> None:
        self.publisher.publish(name, self.adapter(seed), f"seed {seed}", self.outcomes.append)

    def settle(self) -> None:
        """The frontend answers, until nothing is left."""
        while self.host.moves:
            self.host.poll()
            answers, self.answers = self.answers, []
            for lora_id, error in answers:
                self.publisher.finish(lora_id, error)

    def written(self) -> None:
        self.background.submit(lambda: None).result()

    def current(self, name: str) -> str | None:
        return {info.name: info.current for info in self.publisher.adapters()}[name]


@pytest.fixture
def make_desk(make_lab: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def make(salt: str = "salt") -> Desk:
        desks.append(Desk(make_lab(), tmp_path / "versions", salt))
        return desks[-1]

    yield make
    for desk in desks:
        desk.background.shutdown()


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    return make_desk()


def test_a_published_version_is_served_listed_and_written(desk: Desk) -> None:
    desk.publish("bob", 1)
    assert desk.outcomes == []  # the frontend has not answered yet
    desk.settle()
    (version,) = desk.outcomes
    assert isinstance(version, AdapterVersion)
    assert desk.host.names == {"bob": version.lora_id}
    assert set(desk.host.installed) == {version.lora_id}
    (info,) = desk.publisher.adapters()
    assert (info.name, info.current) == ("bob", version.hash)
    assert info.versions[0].source == "seed 1"
    desk.written()
    assert desk.store.served("bob") == [version.hash]


def test_the_same_content_again_succeeds_under_a_fresh_id(desk: Desk) -> None:
    for _ in range(2):
        desk.publish("bob", 1)
        desk.settle()
    first, second = desk.outcomes
    assert first.hash == second.hash
    assert first.lora_id != second.lora_id
    assert desk.host.names["bob"] == second.lora_id
    desk.written()
    assert len(desk.store.versions("bob")) == 1


def test_the_engine_is_told_the_content_of_every_id(desk: Desk) -> None:
    for name, seed in (("bob", 1), ("bob", 2), ("alice", 1)):
        desk.publish(name, seed)
        desk.settle()
    desk.publisher.rollback("bob", None, desk.outcomes.append)
    desk.settle()
    first, second, other, back = desk.outcomes
    assert first.hash == other.hash == back.hash != second.hash
    assert len({version.lora_id for version in desk.outcomes}) == 4
    assert {version.lora_id: version.hash for version in desk.outcomes} == desk.host.versions
    assert all(content_hash(desk.host.installed[lora_id]) == told for lora_id, told in desk.host.versions.items())


def test_content_has_one_hash_published_written_read_and_restarted(
    make_desk: Callable[..., Desk], tmp_path: Path
) -> None:
    """Of two dtypes too, as folding different scalings gives them: files have one."""
    desk = make_desk("one")
    plain = desk.adapter(1)
    first = next(iter(plain.modules))
    mixed = replace(
        plain, modules={**plain.modules, first: LoraPair(plain.modules[first].a.bfloat16(), plain.modules[first].b)}
    )
    for name, adapter in (("plain", plain), ("mixed", mixed)):
        desk.publisher.publish(name, adapter, "a test", desk.outcomes.append)
        desk.settle()
    desk.written()
    published = {info.name: info.current for info in desk.publisher.adapters()}
    assert published["plain"] != published["mixed"]
    for name, version in published.items():
        desk.publisher.load(f"{name}-again", str(tmp_path / "versions" / name / str(version)), desk.outcomes.append)
        desk.settle()
        assert desk.current(f"{name}-again") == version
    desk.written()

    restarted = make_desk("two")
    restarted.settle()
    assert {name: restarted.current(name) for name in published} == published
    assert set(restarted.host.versions.values()) == set(published.values())
    assert not restarted.host.versions.keys() & desk.host.versions.keys()


def test_rollback_goes_back_also_before_anything_is_written(desk: Desk) -> None:
    for seed in (1, 2, 3):
        desk.publish("bob", seed)
        desk.settle()
    first, second, third = desk.outcomes
    desk.publisher.rollback("bob", None, desk.outcomes.append)
    desk.settle()
    assert desk.current("bob") == second.hash
    desk.publisher.rollback("bob", first.hash[:12], desk.outcomes.append)
    desk.settle()
    assert desk.current("bob") == first.hash
    desk.publisher.rollback("bob", third.hash, desk.outcomes.append)
    desk.settle()
    assert desk.current("bob") == third.hash
    assert len({version.lora_id for version in desk.outcomes}) == 6
    with pytest.raises(UnknownNameError, match="0123456"):
        desk.publisher.rollback("bob", "0123456", desk.outcomes.append)
    with pytest.raises(UnknownNameError, match="alice"):
        desk.publisher.rollback("alice", None, desk.outcomes.append)


def test_a_name_that_could_not_be_moved_drops_the_copy_and_keeps_the_version(desk: Desk) -> None:
    desk.publish("bob", 1)
    desk.settle()
    desk.host.move_error = ConflictError("the frontend has no room")
    desk.publish("bob", 2)
    desk.settle()
    first, error = desk.outcomes
    assert error is desk.host.move_error
    assert set(desk.host.installed) == {first.lora_id}
    assert desk.current("bob") == first.hash
    desk.host.move_error = None
    desk.publish("bob", 3)
    desk.settle()
    assert desk.current("bob") == desk.outcomes[2].hash


def test_without_room_nothing_changes(make_host: Any, desk: Desk) -> None:
    desk.host.max_adapters = 1
    desk.publish("bob", 1)
    desk.settle()
    with pytest.raises(ConflictError, match="no room"):
        desk.publish("bob", 2)
    assert desk.current("bob") == desk.outcomes[0].hash
    desk.publisher.drop(desk.outcomes[0].lora_id)
    assert desk.current("bob") is None
    desk.publish("bob", 2)
    desk.settle()
    assert desk.current("bob") == desk.outcomes[1].hash


def test_operations_on_one_name_wait_for_each_other(desk: Desk) -> None:
    desk.publish("bob", 1)
    desk.publish("bob", 2)
    desk.publish("alice", 3)
    assert [move[0] for move in desk.host.moves] == ["bob", "alice"]
    desk.settle()
    assert [version.source for version in desk.outcomes] == ["seed 1", "seed 3", "seed 2"]
    assert desk.publisher.is_waiting is False


def test_a_waiting_operation_without_room_is_answered_with_the_error(desk: Desk) -> None:
    desk.host.max_adapters = 1
    desk.publish("bob", 1)
    desk.publish("bob", 2)
    desk.settle()
    assert isinstance(desk.outcomes[1], ConflictError)
    assert desk.current("bob") == desk.outcomes[0].hash


def test_a_directory_is_loaded_through_the_same_steps(desk: Desk, tmp_path: Path) -> None:
    session = desk.lab.session(["experts"])
    path = tmp_path / "adapter"
    state.write(path, state.snapshot(session, optimizer=False), desk.lab.twin.family, desk.host, replace=False)
    desk.publisher.load("carol", str(path), desk.outcomes.append)
    desk.settle()
    assert desk.outcomes[0].source == str(path)
    (path / "adapter_model.safetensors").write_bytes(b"12345")
    with pytest.raises(AdapterError, match="truncated"):
        desk.publisher.load("carol", str(path), desk.outcomes.append)
    with pytest.raises(NotFoundError):
        desk.publisher.load("carol", str(tmp_path / "nothing"), desk.outcomes.append)
    assert desk.current("carol") == desk.outcomes[0].hash


def test_names_are_served_again_after_a_restart_and_forgotten_ones_are_not(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk()
    for name, seed in (("bob", 1), ("bob", 2), ("alice", 3)):
        desk.publish(name, seed)
        desk.settle()
    desk.publisher.forget("alice")
    desk.written()
    restarted = make_desk("another salt")
    restarted.settle()
    assert [info.name for info in restarted.publisher.adapters()] == ["bob"]
    assert restarted.current("bob") == desk.outcomes[1].hash
    assert not set(restarted.host.installed) & set(desk.host.installed)
    restarted.publisher.rollback("bob", None, restarted.outcomes.append)
    restarted.settle()
    assert restarted.current("bob") == desk.outcomes[0].hash


def test_ids_agree_between_ranks_and_differ_between_processes(make_desk: Callable[..., Desk]) -> None:
    ids = []
    for salt in ("one", "one", "two"):
        desk = make_desk(salt)
        desk.publish("bob", 1)
        ids.append(desk.host.moves[0][2])
    assert ids[0] == ids[1] != ids[2]
