"""Adapters that come into slots beside the engine's thread, in SGLang's real manager and pool (the base's slot, and
three more of rank 8)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from kt_runtime.sglang_patch.lora import pool as pool_module
from kt_runtime.sglang_patch.lora import slots, staging
from kt_runtime.sglang_patch.lora.install import drop_adapter, install_prepared, prepare_adapter

NAMES = ("first", "second", "third", "fourth", "fifth")
PATIENCE_S = 60.0


@pytest.fixture
def installed(served: SimpleNamespace, manager: Any, reference: ModuleType) -> Iterator[Callable[[str], None]]:
    """Makes an adapter servable, without a slot."""
    begun: list[str] = []

    def install(lora_id: str) -> None:
        adapter = reference.random_adapter(served.config, rank=4, alpha=8.0, seed=len(begun))
        begun.append(lora_id)
        install_prepared(manager, lora_id, "name", lora_id, prepare_adapter(manager, served.config, "name", adapter))

    yield install
    for slot in list(slots._reserved(manager.memory_pool)):
        slot.give_back()
    for lora_id in begun:
        drop_adapter(manager, lora_id)


@pytest.fixture
def stage(manager: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[staging.Staging]:
    monkeypatch.setattr(staging, "INLINE_BYTES", 0)
    made = staging.Staging(manager)
    yield made
    made.close()


def wait_for(stage: staging.Staging, lora_id: str, running: set[str | None] = frozenset()) -> None:  # type: ignore[assignment]
    deadline = time.monotonic() + PATIENCE_S
    while stage.may_run(lora_id, set(running)) is False:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def in_slots(manager: Any) -> set[str]:
    return {uid for uid in manager.memory_pool.uid_to_buffer_id if uid is not None}


def content(manager: Any, lora_id: str) -> list[torch.Tensor]:
    pool, slot = manager.memory_pool, manager.memory_pool.get_buffer_id(lora_id)
    return [
        layer[slot].clone() for each in (pool.A_buffer, pool.B_buffer) for name in sorted(each) for layer in each[name]
    ]


def test_a_request_waits_for_its_adapter_while_others_run(
    manager: Any, stage: staging.Staging, installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("first")
    gate = threading.Event()
    real = slots.copies_into

    def gated(*arguments: Any) -> list[Callable[[], None]]:
        assert gate.wait(PATIENCE_S)
        return real(*arguments)

    monkeypatch.setattr(slots, "copies_into", gated)
    assert stage.may_run("first", {None}) is False
    assert stage.may_run("first", {None}) is False and "first" not in in_slots(manager)
    assert stage.may_run(None, {None}) is None  # SGLang decides about others
    gate.set()
    wait_for(stage, "first", {None})
    assert in_slots(manager) == {"first"}
    found = content(manager, "first")
    # The same as SGLang's own load in a batch.
    drop_slot(manager, "first")
    manager.fetch_new_loras({"first", None})
    for one, other in zip(found, content(manager, "first"), strict=True):
        assert torch.equal(one, other)


def drop_slot(manager: Any, lora_id: str) -> None:
    from sglang.srt.lora.mem_pool import EMPTY_SLOT

    pool = manager.memory_pool
    pool.buffer_id_to_uid[pool.uid_to_buffer_id.pop(lora_id)] = EMPTY_SLOT
    pool.eviction_policy.remove(lora_id)


def test_the_least_recently_used_adapter_leaves_and_comes_back(
    manager: Any, stage: staging.Staging, installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "KEPT_SECONDS", 0.0)
    for name in NAMES:
        installed(name)
    for name in NAMES[:3]:
        wait_for(stage, name)
    assert in_slots(manager) == set(NAMES[:3])
    manager.memory_pool.eviction_policy.mark_used("first")
    wait_for(stage, "fourth", {None, "second"})
    assert in_slots(manager) == {"first", "second", "fourth"}
    wait_for(stage, "third", {None, "first", "fourth"})
    assert in_slots(manager) == {"first", "third", "fourth"}
    # All slots are in use: the request waits, and nothing leaves.
    running: set[str | None] = {None, "first", "third", "fourth"}
    assert stage.may_run("fifth", running) is False
    assert in_slots(manager) == running - {None}
    # Without requests for the base its slot serves, too.
    wait_for(stage, "fifth", running - {None})
    assert in_slots(manager) == {"first", "third", "fourth", "fifth"}


def test_an_adapter_that_came_for_a_request_stays_until_it_runs(
    manager: Any, stage: staging.Staging, installed: Callable[[str], None]
) -> None:
    for name in NAMES:
        installed(name)
    for name in NAMES[:3]:
        wait_for(stage, name, {None, *in_slots(manager)})
    assert in_slots(manager) == set(NAMES[:3])
    # "third" has come and does not run yet: with the three others its four slots are taken.
    assert stage.may_run("fourth", {None, "first", "second"}) is False
    assert in_slots(manager) == set(NAMES[:3])


def test_a_budget_moves_adapters_out_and_lets_requests_wait(
    manager: Any, stage: staging.Staging, installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "KEPT_SECONDS", 0.0)
    for name in NAMES[:3]:
        installed(name)
        wait_for(stage, name)
    each = pool_module.slot_bytes(manager.memory_pool, manager.loras["first"])
    stage.budget_bytes = 2 * each
    stage.turn(lambda: {"first"})
    assert in_slots(manager) == {"first", "third"}
    assert stage.may_run("second", {"first", "third"}) is False  # no room beside both
    deadline = time.monotonic() + PATIENCE_S
    while stage._emptied:
        assert time.monotonic() < deadline
        stage.turn(set)
    wait_for(stage, "second", {"third"})
    stage.turn(lambda: {"second", "third"})
    assert in_slots(manager) == {"second", "third"}
    stage.budget_bytes = 1  # an adapter alone may exceed it
    wait_for(stage, "first")


def test_what_fits_at_once_is_bounded_by_slots_and_by_memory(
    manager: Any, stage: staging.Staging, installed: Callable[[str], None]
) -> None:
    for name in NAMES:
        installed(name)
    assert stage._could_hold({None, *NAMES[:3]}) and stage._could_hold({*NAMES[:4]})
    assert not stage._could_hold({None, *NAMES[:4]})  # four slots
    stage.budget_bytes = 2 * pool_module.slot_bytes(manager.memory_pool, manager.loras["first"])
    assert stage._could_hold({None, *NAMES[:2]}) and not stage._could_hold({None, *NAMES[:3]})
    stage.budget_bytes = 1
    assert stage._could_hold({None, "first"}) and not stage._could_hold({"first", "second"})


def test_with_a_budget_ranks_hold_the_same_adapters_whenever_their_threads_give_pages_back(
    manager: Any, installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose thread is held up beside one whose thread is not: what may run and what is in slots are equal."""
    monkeypatch.setattr(staging.group, "num_ranks", lambda: 2)
    for name in NAMES:
        installed(name)
    each = pool_module.slot_bytes(manager.memory_pool, manager.loras["first"])
    batches = ["first", "second", "third", "first fourth", "fifth", "fourth fifth", "second", "first third", "fifth"]

    def run(*, is_held_up: bool) -> list[Any]:
        made, gate = staging.Staging(manager, 2 * each), threading.Event()
        seen: list[Any] = []
        if is_held_up:
            made._threads.submit(gate.wait, PATIENCE_S)
        for batch in map(str.split, batches):
            seen.append([made.may_run(name, {"first", "second"}) for name in NAMES])
            manager.fetch_new_loras({None, *batch})
            made.turn(lambda batch=batch: set(batch))  # type: ignore[misc]
            while not is_held_up and made._emptied:
                time.sleep(0.001)
                made.settle()
            seen.append(in_slots(manager))
        gate.set()
        made.budget_bytes, made._present = 0, set()
        made.turn(set)
        while made._emptied:
            time.sleep(0.001)  # the thread that gives pages back needs this one's lock
            made.settle()
        made.close()
        return seen

    expected = run(is_held_up=False)
    assert run(is_held_up=True) == expected
    assert [None, None, False, False, False] in expected
    assert all(len(held) <= 2 for held in expected[1::2])


def test_a_batch_takes_another_adapter_s_slot_before_one_that_a_request_awaits(
    manager: Any, stage: staging.Staging, installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES[:4]:
        installed(name)
    manager.fetch_new_loras({None, "first", "second"})
    gate = threading.Event()
    real = slots.copies_into
    monkeypatch.setattr(slots, "copies_into", lambda *given: real(*given) if gate.wait(PATIENCE_S) else [])
    assert stage.may_run("third", {None, "second"}) is False  # the last empty slot is reserved for it
    manager.fetch_new_loras({None, "second", "fourth"})
    assert in_slots(manager) == {"second", "fourth"}
    # Without such an adapter, the batch comes first.
    manager.fetch_new_loras({None, "second", "fourth", "first"})
    assert in_slots(manager) == {"second", "fourth", "first"} and not slots._reserved(manager.memory_pool)
    gate.set()


def test_a_dropped_adapter_is_brought_in_no_more(
    manager: Any, stage: staging.Staging, installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("first")
    monkeypatch.setattr(staging, "_staging", stage)
    assert stage.may_run("first", set()) is False
    drop_adapter(manager, "first")
    assert not stage._fills and not slots._reserved(manager.memory_pool)
    time.sleep(0.05)
    stage.settle()
    assert in_slots(manager) == set()


def test_a_small_adapter_is_copied_in_its_batch(
    manager: Any, installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "INLINE_BYTES", 1 << 40)
    made = staging.Staging(manager)
    installed("first")
    assert made.may_run("first", set()) is None and not made._fills
    # Unless it takes much more memory in a slot.
    monkeypatch.setattr(slots, "AT_ONCE_BYTES", 0)
    assert made.may_run("first", {None}) is False and list(made._fills) == ["first"]
    made.close()


@pytest.mark.parametrize("budget_bytes", [None, 1 << 40])
def test_the_memory_of_a_dropped_adapter_is_kept_for_the_next_one_up_to_a_bound(
    manager: Any, installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, budget_bytes: int | None
) -> None:
    """With a budget for the adapters, only what is too little to matter is kept."""
    pool = manager.memory_pool
    for name in ("kt_written", "kt_needed"):
        monkeypatch.setattr(pool, name, {}, raising=False)
    monkeypatch.setattr(pool, "kt_most_spare", slots.RELEASED_BYTES, raising=False)
    made = staging.Staging(manager, budget_bytes)
    monkeypatch.setattr(staging, "_staging", made)
    released: list[int] = []

    def release(slot: slots.ReservedSlot) -> None:
        released.append(slot.index)
        slot.give_back()

    monkeypatch.setattr(made, "_release", release)
    most = slots.MOST_SPARE_BYTES if budget_bytes is None else slots.RELEASED_BYTES
    for num_bytes, is_kept in ((most, True), (most + 1, False)):
        installed(f"of {num_bytes}")
        manager.fetch_new_loras({f"of {num_bytes}"})
        index = manager.memory_pool.get_buffer_id(f"of {num_bytes}")
        pool.kt_written.clear()
        pool.kt_written[index] = num_bytes
        drop_adapter(manager, f"of {num_bytes}")
        assert released == ([] if is_kept else [index])
    made.close()


def test_mapped_memory_is_committed_by_writing_and_given_back() -> None:
    shape, process = (4, 1024, 8192), psutil.Process()
    mapping = pool_module.MappedZeros()
    before = process.memory_info().rss
    with mapping:
        buffer = torch.zeros(shape, dtype=torch.float32, device=torch.device("cpu"))
    assert process.memory_info().rss - before < buffer[0].nbytes / 4
    buffer[1:3] = 1.0
    assert process.memory_info().rss - before > 1.5 * buffer[0].nbytes
    made = SimpleNamespace(
        A_buffer={"q_proj": [buffer]}, B_buffer={}, kt_mapped=mapping.memory, kt_written={1: 5, 2: 5}
    )
    for part in pool_module.release_parts(made, 1):
        part()
    assert process.memory_info().rss - before < 1.5 * buffer[0].nbytes
    assert not buffer[1].any() and bool((buffer[2] == 1.0).all())
    assert (pool_module.written_bytes(made, 1), pool_module.written_bytes(made, 2)) == (0, 5)
