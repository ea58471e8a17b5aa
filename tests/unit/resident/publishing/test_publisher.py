from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from reference.expert_problems import present
from reference.lora import huge_adapter, random_adapter, write_adapter
from reference.resident.desk import Desk

from kt_runtime.adapters import AdapterTensors, AdapterVersion, LoraPair, as_version, content_hash
from kt_runtime.errors import AdapterError, ConflictError, InvalidValueError, NotFoundError, UnknownNameError
from kt_runtime.resident.publishing import persistence, preparation
from kt_runtime.resident.publishing.publisher import MAX_WAITING_OF_NAME
from kt_runtime.resident.scheduler import Slices, run_at_once
from kt_runtime.resident.training import checkpoint


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


@pytest.mark.slow
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
    for name, version in (("bob", "0123456"), ("alice", None)):
        desk.publisher.rollback(name, version, desk.outcomes.append)
        desk.settle()
        assert isinstance(desk.outcomes[-1], UnknownNameError)
        assert (version or name) in str(desk.outcomes[-1])


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
    desk.publish("bob", 2)
    desk.settle()
    assert "no room" in str(desk.outcomes[1])
    assert desk.current("bob") == desk.outcomes[0].hash
    desk.publisher.drop(desk.outcomes[0].lora_id)
    assert desk.current("bob") is None
    desk.publish("bob", 2)
    desk.settle()
    assert desk.current("bob") == desk.outcomes[2].hash


def test_operations_on_one_name_wait_for_each_other(desk: Desk) -> None:
    desk.publish("bob", 1)
    desk.publish("bob", 2)
    desk.publish("alice", 3)
    desk.prepared()
    desk.prepared()
    assert sorted(move[0] for move in desk.host.moves) == ["alice", "bob"]
    desk.settle()
    assert {version.source for version in desk.outcomes[:2]} == {"seed 1", "seed 3"}
    assert desk.outcomes[2].source == "seed 2"


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
    snapshot = run_at_once(checkpoint.snapshot(session, optimizer=False))
    checkpoint.write(path, snapshot, desk.lab.twin.family, desk.host, replace=False)
    desk.publisher.load("carol", str(path), desk.outcomes.append)
    desk.settle()
    assert desk.outcomes[0].source == str(path)
    (path / "adapter_model.safetensors").write_bytes(b"12345")
    (tmp_path / "adapter.safetensors").touch()
    for place in (path, tmp_path / "nothing", tmp_path / "nothing.gguf", tmp_path / "adapter.safetensors"):
        desk.publisher.load("carol", str(place), desk.outcomes.append)
    desk.settle()
    assert isinstance(desk.outcomes[1], AdapterError) and "truncated" in str(desk.outcomes[1])
    for outcome in desk.outcomes[2:]:
        assert isinstance(outcome, NotFoundError) and "not downloaded" in str(outcome)
    assert desk.current("carol") == desk.outcomes[0].hash


def write_directory(desk: Desk, path: Path) -> str:
    session = desk.lab.session(["attention"])
    snapshot = run_at_once(checkpoint.snapshot(session, optimizer=False))
    checkpoint.write(path, snapshot, desk.lab.twin.family, desk.host, replace=False)
    session.close()
    return str(path)


def load_ahead(desk: Desk, name: str, path: str, *, has_ended: bool) -> None:
    """`has_ended`: what is read ahead, before the engine's thread knows of the load."""
    desk.publisher.read_ahead("ahead", name, path)
    if has_ended:
        assert desk.ended.get(timeout=60)[0] == "ahead"
    desk.publisher.load(name, path, desk.outcomes.append, ahead="ahead")


def test_a_file_that_was_read_ahead_moves_its_name_without_a_further_turn(desk: Desk, tmp_path: Path) -> None:
    path = write_directory(desk, tmp_path / "adapter")
    load_ahead(desk, "carol", path, has_ended=True)
    assert len(desk.host.moves) == 1 and len(desk.host.placed) == 1
    desk.moved()
    desk.publisher.load("dave", path, desk.outcomes.append)
    desk.settle()
    read_ahead, plainly = desk.outcomes
    assert read_ahead.hash == plainly.hash and read_ahead.source == path
    assert desk.current("carol") == desk.current("dave")


def test_a_load_waits_for_what_is_still_read_ahead(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_directory(desk, tmp_path / "adapter")
    desk.publisher.read_ahead("ahead", "carol", path)
    key, error = desk.ended.get(timeout=60)
    with monkeypatch.context() as patched:
        patched.setattr(desk.workers, "has_ended", lambda _: False)
        desk.publisher.load("carol", path, desk.outcomes.append, ahead=key)
    assert not desk.host.moves
    desk.publisher.probe(key, error)
    desk.moved()
    assert desk.current("carol") == desk.outcomes[0].hash


def test_a_large_file_is_not_read_ahead(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "SMALL_BYTES", 1)
    path = write_directory(desk, tmp_path / "adapter")
    load_ahead(desk, "carol", path, has_ended=True)
    assert not desk.host.moves and not desk.host.placed
    assert desk.host.slot_bytes == [sum(each.stat().st_size for each in Path(path).iterdir())]
    desk.settle()
    assert desk.current("carol") == desk.outcomes[0].hash


def test_errors_of_what_is_read_ahead_are_those_of_the_load(desk: Desk, tmp_path: Path) -> None:
    load_ahead(desk, "carol", str(tmp_path / "nothing"), has_ended=True)
    assert isinstance(desk.outcomes[0], NotFoundError) and "not downloaded" in str(desk.outcomes[0])
    with pytest.raises(InvalidValueError):
        load_ahead(desk, "no name", str(tmp_path / "nothing"), has_ended=True)
    assert not desk.is_busy and not desk.workers._jobs and not desk.publisher._ahead


def test_a_name_that_is_unloaded_gives_up_what_was_read_ahead(desk: Desk, tmp_path: Path) -> None:
    path = write_directory(desk, tmp_path / "adapter")
    desk.publish("carol", 1)
    for key in ("first", "second"):
        desk.publisher.read_ahead(key, "carol", path)
        desk.publisher.load("carol", path, desk.outcomes.append, ahead=key)
    desk.forget("carol")
    assert [type(each) for each in desk.outcomes] == [ConflictError] * 3
    assert desk.workers.finish(60) and not desk.workers._jobs and not desk.publisher._ahead


def test_names_are_served_again_after_a_restart_and_forgotten_ones_are_not(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk()
    for name, seed in (("bob", 1), ("bob", 2), ("alice", 3)):
        desk.publish(name, seed)
        desk.settle()
    desk.publisher.forget("alice", lambda outcome: None)
    desk.written()
    restarted = make_desk("another salt")
    assert restarted.publisher.restoring() == ["bob"]
    restarted.settle()
    assert restarted.publisher.restoring() == []
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
        desk.prepared()
        ids.append(desk.host.moves[0][2])
    assert ids[0] == ids[1] != ids[2]


# The stages.


def test_nothing_is_read_checked_or_converted_on_the_engines_thread(desk: Desk, tmp_path: Path) -> None:
    adapter = random_adapter(desk.host.config, rank=4, alpha=8.0, seed=1)
    assert isinstance(desk.loaded("bob", adapter, tmp_path / "bob"), AdapterVersion)
    desk.publish("bob", 1)
    desk.settle()
    desk.publisher.rollback("bob", None, desk.outcomes.append)
    desk.settle()
    assert len(desk.outcomes) == 3
    assert desk.host.preparing_threads and all(name.startswith("kt-prepare") for name in desk.host.preparing_threads)


def test_only_an_adapter_that_could_overflow_is_probed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[str] = []
    probe = present(desk.publisher._probe)
    slices = probe.slices

    def noted(adapter: AdapterTensors, where: str) -> Slices:
        probed.append(where)
        return slices(adapter, where)

    monkeypatch.setattr(probe, "slices", noted)
    desk.publish("bob", 1)
    desk.settle()
    assert probed == []
    large = desk.adapter(1)
    for pair in large.modules.values():
        pair.b.mul_(1e12)
    desk.publisher.publish("alice", large, "a test", desk.outcomes.append)
    desk.settle()
    assert probed == ["adapter 'alice'"]


@pytest.mark.slow
def test_every_slot_is_given_back_or_used(desk: Desk, tmp_path: Path) -> None:
    """Whatever becomes of its operation. A slot that is used is given back too, which has no effect then."""
    desk.publish("bob", 1)
    desk.publish("bob", 2)  # waits, without a slot
    assert len(desk.host.reserved) == 1
    desk.settle()
    assert desk.loaded("bob", huge_adapter(desk.host.config), tmp_path / "huge").__class__ is AdapterError
    desk.host.move_error = ConflictError("the frontend has no room")
    desk.publish("bob", 3)
    desk.settle()
    desk.host.move_error, desk.host.max_adapters = None, 1
    desk.publish("bob", 4)
    desk.settle()
    for _ in range(2):
        preparation = desk.publisher.preparation("alice")
        prepared = preparation.checked(desk.adapter(5), "a test")
        desk.publisher.publish_prepared("alice", preparation, prepared, desk.outcomes.append)
    desk.forget("alice")
    desk.publish("carol", 6)
    desk.forget("carol")
    desk.settle()
    assert desk.workers.finish(60)
    assert desk.host.slots_reserved >= 7 and desk.host.reserved == set()


def test_a_crash_between_the_answer_and_the_disk_leaves_the_version_before(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list says so until then: not stored."""
    desk = make_desk("one")
    desk.publish("bob", 1)
    desk.settle()
    desk.written()
    assert desk.info("bob").versions[0].stored
    monkeypatch.setattr(persistence, "DELAY_SECONDS", 3600.0)
    desk.publish("bob", 2)
    desk.settle()
    first, second = desk.outcomes
    assert desk.current("bob") == second.hash
    newest, before = desk.info("bob").versions
    assert (newest.version, newest.stored, newest.not_stored) == (second.hash, False, persistence.WRITING)
    assert (before.version, before.stored) == (first.hash, True)
    restarted = make_desk("after the crash")  # from what is on disk now
    restarted.settle()
    assert restarted.current("bob") == first.hash
    desk.publisher.close()  # but a server that is stopped writes it
    stopped = make_desk("after the end")
    stopped.settle()
    assert stopped.current("bob") == second.hash


def test_a_name_that_is_slow_to_read_holds_up_no_other(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, prepare = threading.Event(), desk.host.prepare_adapter

    def slow(name: str, *arguments: Any) -> Any:
        assert name != "slow" or gate.wait(60)
        return prepare(name, *arguments)

    monkeypatch.setattr(desk.host, "prepare_adapter", slow)
    desk.publish("slow", 1)
    desk.publish("bob", 2)
    desk.prepared()
    desk.moved()
    assert [version.source for version in desk.outcomes] == ["seed 2"]
    gate.set()
    desk.settle()
    assert [version.source for version in desk.outcomes] == ["seed 2", "seed 1"]


def test_two_directories_that_hang_hold_up_no_other_name(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A dead network mount: whoever reads there never comes back. Its client is told, and the name is free again."""
    gate, check, now = threading.Event(), preparation.check_is_adapter, [100.0]

    def hangs(path: Path) -> None:
        if "dead" in str(path):
            assert gate.wait(60)
        check(path)

    monkeypatch.setattr(preparation, "check_is_adapter", hangs)  # the first look at the path
    monkeypatch.setattr(desk.workers, "_clock", lambda: now[0])
    outcomes: dict[str, Any] = {}
    for name in ("one", "two"):
        desk.publisher.load(name, f"/dead/{name}", partial(outcomes.__setitem__, name))
    desk.publish("bob", 1)
    deadline = time.monotonic() + 120
    while desk.ended.qsize() < 3:  # bob, and both errors
        assert time.monotonic() < deadline
        now[0] += 30.0
        desk.workers.look()
        time.sleep(0.01)
    desk.settle()
    assert [version.source for version in desk.outcomes] == ["seed 1"]
    assert "(/dead/one): the file system has not answered for 60 s" in str(outcomes["one"])
    desk.publish("one", 2)
    desk.settle()
    assert desk.current("one") == desk.outcomes[-1].hash
    gate.set()


@pytest.mark.slow
def test_too_many_operations_of_one_name_are_refused_before_anything_is_copied(desk: Desk) -> None:
    for seed in range(1 + MAX_WAITING_OF_NAME):
        desk.publish("bob", seed)
    with pytest.raises(ConflictError, match=f"{MAX_WAITING_OF_NAME} operations wait"):
        desk.publish("bob", 9)
    desk.publish("alice", 9)
    desk.settle()
    assert sum(isinstance(outcome, AdapterVersion) for outcome in desk.outcomes) == 2 + MAX_WAITING_OF_NAME


def test_a_rollback_is_of_what_the_name_means_when_its_turn_comes(desk: Desk) -> None:
    for seed in (1, 2):
        desk.publish("bob", seed)
    desk.publisher.rollback("bob", None, desk.outcomes.append)
    desk.settle()
    first, _, back = desk.outcomes
    assert back.hash == first.hash == desk.current("bob")


# The gate.


@pytest.mark.parametrize("only", [(), ("attention",), ("experts",), ("mlp",)], ids=str)
def test_finite_weights_whose_forward_pass_is_not_finite_are_refused(desk: Desk, tmp_path: Path, only: Any) -> None:
    good = random_adapter(desk.host.config, rank=4, alpha=8.0, seed=1)
    served = desk.loaded("bob", good, tmp_path / "good")
    outcome = desk.loaded("bob", huge_adapter(desk.host.config, only=only), tmp_path / "huge")
    assert isinstance(outcome, AdapterError)
    assert "adapter 'bob': its forward pass is not finite: NaN or Inf from layer" in str(outcome)
    assert desk.current("bob") == served.hash
    assert set(desk.host.installed) == {served.lora_id}
    assert desk.lab.twin.experts_of(1).adapters == {}  # nothing of it stays in the twin
    desk.written()
    assert [version.hash for version in desk.store.versions("bob")] == [served.hash]


def test_the_layer_from_which_on_it_is_not_finite_is_named(desk: Desk, tmp_path: Path) -> None:
    adapter = random_adapter(desk.host.config, rank=4, alpha=8.0, seed=1)
    name = "model.layers.1.self_attn.o_proj"
    pairs = {**adapter.modules, name: LoraPair(*(tensor * 0 + 3e38 for tensor in adapter.modules[name]))}
    outcome = desk.loaded("bob", replace(adapter, modules=pairs), tmp_path / "huge")
    assert "NaN or Inf from layer 1 on" in str(outcome)


def test_a_version_that_is_not_finite_is_not_served_again_after_a_restart(make_desk: Callable[..., Desk]) -> None:
    """One that an earlier server wrote, which had no gate."""
    desk = make_desk("one")
    desk.publish("alice", 1)
    desk.settle()
    desk.written()
    trap = as_version(huge_adapter(desk.host.config), desk.lab.twin.family, desk.host.config)
    version = desk.store.save("bob", trap, created=1.0)
    desk.store.point("bob", [version.hash])
    restarted = make_desk("two")
    restarted.settle()
    assert restarted.current("bob") is None
    assert "not finite" in restarted.info("bob").problem
    assert restarted.current("alice") == desk.outcomes[0].hash and restarted.info("alice").problem is None
    restarted.publisher.rollback("bob", version.hash, restarted.outcomes.append)
    restarted.settle()
    refused = restarted.outcomes[-1]
    assert isinstance(refused, ConflictError | AdapterError)
    restarted.publish("bob", 2)
    restarted.settle()
    assert restarted.info("bob").problem is None and restarted.current("bob") == restarted.outcomes[-1].hash


# Unloading.


@pytest.mark.parametrize("is_late", [False, True], ids=["still running", "its end is reported already"])
def test_unloading_while_its_publication_is_on_another_thread_ends_both(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    desk.publish("bob", 1)
    desk.settle()
    first = desk.outcomes[0].lora_id
    gate, prepare = threading.Event(), desk.host.prepare_adapter

    def waits(*arguments: Any) -> Any:
        assert gate.wait(60)
        return prepare(*arguments)

    monkeypatch.setattr(desk.host, "prepare_adapter", waits)
    desk.publish("bob", 2)
    desk.publish("bob", 3)
    reports = []
    if is_late:
        gate.set()
        reports.append(desk.ended.get(timeout=60))
    assert desk.forget("bob") == [first]
    assert [str(outcome) for outcome in desk.outcomes[1:]] == ["adapter 'bob' was unloaded before this had ended"] * 2
    gate.set()
    assert desk.workers.finish(60)
    for report in reports:
        desk.publisher.probe(*report)  # nobody wants it any more
    assert desk.ended.empty() and desk.scheduler.is_idle
    assert desk.host.moves == [] and not desk.is_busy
    assert set(desk.host.installed) == {first}  # the frontend drops it when its last request has ended
    desk.publish("bob", 4)
    desk.settle()
    assert desk.current("bob") == desk.outcomes[-1].hash


def test_unloading_after_the_frontend_was_asked_waits_for_its_answer(desk: Desk) -> None:
    desk.publish("bob", 1)
    desk.prepared()
    told = desk.forget("bob")
    assert told == [] and desk.outcomes == []
    desk.settle()
    assert told == [desk.outcomes[0].lora_id]
    assert desk.publisher.adapters() == []
    desk.written()
    assert desk.store.names() == []


def test_unloading_what_is_not_there_is_an_error_and_what_is_only_begun_is_not(desk: Desk) -> None:
    (error,) = desk.forget("bob")
    assert isinstance(error, UnknownNameError)
    desk.publish("bob", 1)
    assert desk.forget("bob") == [None]
    assert isinstance(desk.outcomes[0], ConflictError)


# Owners.


def test_what_could_not_be_written_is_shown_and_rolled_back_to_from_memory(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(persistence, "FIRST_PAUSE_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(desk.store, "save", full)
        for seed in (1, 2):
            desk.publish("bob", seed)
            desk.settle()
        while "No space" not in str(desk.info("bob").versions[0].not_stored):
            time.sleep(0.01)
        assert [version.stored for version in desk.info("bob").versions] == [False, False]
        assert {item.name for item in desk.publisher.unstored()} == {"bob"}
        desk.publisher.rollback("bob", None, desk.outcomes.append)
        desk.settle()
        assert desk.current("bob") == desk.outcomes[0].hash
    desk.written()
    assert [version.stored for version in desk.info("bob").versions] == [True, True]
    assert desk.publisher.unstored() == []


def test_a_version_of_another_server_moves_the_name_and_leaves_its_owner(desk: Desk, tmp_path: Path) -> None:
    session = desk.session("trainer")
    desk.publish("bob", 1, session=session)
    desk.settle()
    adapter = as_version(desk.adapter(2), desk.lab.twin.family, desk.host.config)
    write_adapter(tmp_path / "pulled", adapter)
    follows = (content_hash(adapter), "of two")
    desk.publisher.load("bob", str(tmp_path / "pulled"), desk.outcomes.append, follows=follows)
    desk.settle()
    assert desk.outcomes[-1].hash == desk.current("bob") == content_hash(adapter)
    info = desk.info("bob")
    assert (info.owner, info.versions[0].source) == ("trainer", "of two")
    desk.publish("bob", 3, session=session)  # without take_over
    desk.settle()
    assert isinstance(desk.outcomes[-1], AdapterVersion) and desk.current("bob") == desk.outcomes[-1].hash


def test_a_version_with_another_hash_is_not_served(desk: Desk, tmp_path: Path) -> None:
    adapter = as_version(desk.adapter(2), desk.lab.twin.family, desk.host.config)
    write_adapter(tmp_path / "pulled", adapter)
    desk.publisher.load("bob", str(tmp_path / "pulled"), desk.outcomes.append, follows=("0" * 64, "of two"))
    desk.settle()
    assert isinstance(desk.outcomes[-1], AdapterError) and content_hash(adapter) in str(desk.outcomes[-1])
    assert desk.host.names == {} and not desk.host.installed
