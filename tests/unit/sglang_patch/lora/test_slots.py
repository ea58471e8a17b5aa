"""Slots that are filled before the first request, in SGLang's real manager and pool (four slots of rank 8)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from reference import lora
from sglang.srt.lora.mem_pool import EMPTY_SLOT

from kt_runtime import spare
from kt_runtime.adapters import AdapterTensors
from kt_runtime.sglang_patch.lora import pool as pool_module
from kt_runtime.sglang_patch.lora import slots
from kt_runtime.sglang_patch.lora.install import drop_adapter, install_prepared, prepare_adapter
from kt_runtime.spare import Leaving


@pytest.fixture
def adapter(served: SimpleNamespace, reference: ModuleType) -> AdapterTensors:
    return reference.random_adapter(served.config, rank=4, alpha=8.0, seed=0)


@pytest.fixture(autouse=True)
def no_reservation_stays(manager: Any) -> Iterator[None]:
    yield
    for slot in list(slots._reserved(manager.memory_pool)):
        slot.give_back()


def publish(served: Any, manager: Any, lora_id: str, adapter: AdapterTensors) -> slots.ReservedSlot | None:
    slot = slots.reserve(manager)
    prepared = prepare_adapter(manager, served.config, "name", adapter, slot)
    install_prepared(manager, lora_id, "name", "content", prepared)
    return slot


def content(manager: Any, lora_id: str) -> list[torch.Tensor]:
    pool, slot = manager.memory_pool, manager.memory_pool.get_buffer_id(lora_id)
    return [
        layer[slot].clone() for each in (pool.A_buffer, pool.B_buffer) for name in sorted(each) for layer in each[name]
    ]


def spoil(manager: Any) -> None:
    """What other adapters may have left in the slots."""
    pool = manager.memory_pool
    for buffers in (pool.A_buffer, pool.B_buffer):
        for layers in buffers.values():
            for layer in layers:
                layer.zero_()


def test_a_filled_slot_has_what_sglangs_load_would_have_put_there(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(manager)
    publish(served, manager, "beside", adapter)
    in_advance = content(manager, "beside")
    install_prepared(manager, "later", "name", "content", prepare_adapter(manager, served.config, "name", adapter))
    manager.fetch_new_loras({"later", None})
    assert manager.memory_pool.get_buffer_id("later") != manager.memory_pool.get_buffer_id("beside")
    for one, other in zip(in_advance, content(manager, "later"), strict=True):
        assert torch.equal(one, other)
    # Its first batch copies nothing, and its slot is freed as any other's.
    monkeypatch.setattr(pool_module, "fill_slot", lambda *arguments: pytest.fail("copied again"))
    manager.fetch_new_loras({"beside", None})
    drop_adapter(manager, "beside")
    assert "beside" not in manager.memory_pool.uid_to_buffer_id
    assert slots.reserve(manager) is not None


def test_a_slot_that_is_filled_at_once_has_the_same(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(manager)
    publish(served, manager, "on threads", adapter)
    slot = slots.reserve(manager)
    assert slot is not None
    prepared = prepare_adapter(manager, served.config, "name", adapter)
    written = pool_module._counts(manager.memory_pool, "kt_written")
    written[slot.index] = slots.RELEASED_BYTES + (1 << 30)
    assert not slot.fill_at_once(prepared.adapter)  # pages to give back: not on the engine's thread
    written.clear()
    assert slot.fill_at_once(prepared.adapter)
    install_prepared(manager, "at once", "name", "content", replace(prepared, slot=slot))
    for one, other in zip(content(manager, "on threads"), content(manager, "at once"), strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(pool_module, "fill_slot", lambda *arguments: pytest.fail("copied again"))
    manager.fetch_new_loras({"at once", None})


def test_the_engine_s_thread_fills_no_slot_that_takes_much_memory(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the adapter: committing a gigabyte of B's unused columns takes a second."""
    built = prepare_adapter(manager, served.config, "name", adapter).adapter
    in_slot = pool_module.slot_bytes(manager.memory_pool, built)
    assert in_slot > built.num_bytes
    monkeypatch.setattr(slots, "copies_into", lambda *arguments: pytest.fail("copied"))
    monkeypatch.setattr(slots, "AT_ONCE_BYTES", in_slot - 1)
    slot = slots.reserve(manager)
    assert slot is not None and not slot.fill_at_once(built)
    monkeypatch.undo()
    monkeypatch.setattr(slots, "AT_ONCE_BYTES", in_slot)
    assert slot.fill_at_once(built)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_served_is_the_masters_rounding_to_the_bit(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the copy that the slots are filled from, also halfway between two bf16 numbers (to even)."""
    name = "model.layers.0.self_attn.o_proj"
    a = adapter.modules[name].a
    a[0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-20])
    monkeypatch.setattr(manager, "dtype", dtype)
    built = prepare_adapter(manager, served.config, "name", adapter).adapter
    weight = lora.joined(built.weights["o_proj", 0])
    assert torch.equal(weight.a, a.to(dtype)) and weight.a.dtype == dtype
    if dtype == torch.bfloat16:
        assert weight.a[0, :4].tolist() == [1, 1 + 2**-6, -1, 1 + 2**-7]
    gate, up = (adapter.modules[f"model.layers.1.mlp.experts.{part}_proj"] for part in ("gate", "up"))
    experts = lora.joined(built.weights["gate_up_proj_moe", 1])
    assert torch.equal(experts.a, torch.cat([gate.a, up.a], dim=1).to(dtype))
    assert torch.equal(experts.b, torch.cat([gate.b, up.b], dim=1).to(dtype))


def test_a_batch_that_needs_the_slot_gets_it_and_the_adapter_is_copied_later(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors
) -> None:
    """Four slots: the base's, and three reserved ones, which three other adapters need."""
    manager.fetch_new_loras({None})
    reserved = [slot for _ in range(3) if (slot := slots.reserve(manager)) is not None]
    assert len({slot.index for slot in reserved}) == 3
    assert slots.reserve(manager) is None
    prepared = prepare_adapter(manager, served.config, "name", adapter, reserved[0])
    for lora_id in ("one", "two", "three"):
        install_prepared(manager, lora_id, lora_id, "content", prepare_adapter(manager, served.config, "n", adapter))
    manager.fetch_new_loras({"one", None})
    assert sum(isinstance(uid, slots.ReservedSlot) for uid in manager.memory_pool.buffer_id_to_uid) == 2
    manager.fetch_new_loras({"one", "two", "three", None})
    assert not any(isinstance(uid, slots.ReservedSlot) for uid in manager.memory_pool.buffer_id_to_uid)
    for slot in reserved:
        slot.give_back()  # no effect any more
    assert set(manager.memory_pool.uid_to_buffer_id) == {"one", "two", "three", None}
    install_prepared(manager, "late", "name", "content", prepared)
    assert "late" not in manager.memory_pool.uid_to_buffer_id
    manager.fetch_new_loras({"late"})
    slot_of_late = manager.memory_pool.get_buffer_id("late")
    o_proj = adapter.modules["model.layers.0.self_attn.o_proj"]
    assert torch.equal(manager.memory_pool.A_buffer["o_proj"][0][slot_of_late, :4], o_proj.a)


def test_a_slot_that_is_taken_back_while_it_is_filled_is_written_no_more(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`give_back` returns when the copies under way have ended; the others never begin."""
    began, gate, ran = threading.Event(), threading.Event(), []

    def copy() -> None:
        began.set()
        assert gate.wait(60)
        ran.append(threading.current_thread().name)

    slot = slots.reserve(manager)
    assert slot is not None
    monkeypatch.setattr(slots, "copies_into", lambda *arguments: [copy] * 100)
    prepared = prepare_adapter(manager, served.config, "name", adapter)
    filling = threading.Thread(target=slot.fill, args=(prepared.adapter,))
    filling.start()
    assert began.wait(60)
    giving = threading.Thread(target=slot.give_back)
    giving.start()
    giving.join(0.1)
    assert giving.is_alive()
    gate.set()
    giving.join(60)
    count = len(ran)
    filling.join(60)
    assert len(ran) == count < 100
    assert not slot.use(manager, "one") and "one" not in manager.memory_pool.uid_to_buffer_id


def test_a_slot_that_was_never_filled_is_not_used(served: SimpleNamespace, manager: Any) -> None:
    slot = slots.reserve(manager)
    assert slot is not None
    assert not slot.use(manager, "one")
    slot.give_back()
    assert not slot.use(manager, "one")


def test_a_pool_on_an_accelerator_is_filled_by_its_first_batch(manager: Any) -> None:
    elsewhere = SimpleNamespace(memory_pool=manager.memory_pool, device="cuda")
    assert slots.reserve(elsewhere) is None


@pytest.fixture
def written(manager: Any, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The committed bytes of each slot, which the test states."""
    pool, made = manager.memory_pool, dict[int, int]()
    monkeypatch.setattr(pool, "kt_written", made, raising=False)
    monkeypatch.setattr(pool, "kt_needed", {}, raising=False)
    monkeypatch.setattr(pool, "kt_most_spare", slots.RELEASED_BYTES, raising=False)
    return made


def test_of_several_empty_slots_the_one_with_most_memory_is_filled(manager: Any, written: dict[int, int]) -> None:
    written[2] = 5
    first = slots.reserve(manager)
    assert first is not None and first.index == 2
    second = slots.reserve(manager)
    assert second is not None and second.index != 2


@pytest.fixture
def stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread gives the pages of emptied slots back."""
    monkeypatch.setattr(slots, "give_back", Leaving)


@pytest.mark.usefixtures("stays")
def test_an_emptied_slot_is_used_before_all_of_its_pages_are_given_back(
    manager: Any, written: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not before an empty one. What it has left is counted, and stays."""
    others = [slot for _ in range(2) if (slot := slots.reserve(manager)) is not None]
    emptied = slots.reserve(manager)
    assert emptied is not None and len(others) == 2
    manager.fetch_new_loras({None})
    others.pop().give_back()
    buffers = [b for each in manager.memory_pool.B_buffer.values() for b in each]
    for buffer in buffers:
        buffer[emptied.index].fill_(1.0)
    written[emptied.index] = size = 2 * slots.RELEASED_BYTES
    leaving = emptied.empty()
    reserved: list[slots.ReservedSlot | None] = []
    parts = len(leaving._parts)
    assert written.get(emptied.index, 0) == 0 and parts >= 2

    def after_the_first_part(num_bytes: int) -> None:
        assert num_bytes == -(-size // parts) and not leaving.ended.done()
        reserved.extend(slots.reserve(manager) for _ in range(2))

    monkeypatch.setattr(spare, "_wait", after_the_first_part)
    leaving.give_back()
    first, second = reserved  # no further part was given back
    assert first is not None and first.index != emptied.index
    assert second is not None and second.index == emptied.index and emptied.is_lost
    assert leaving.ended.done() and written[second.index] == size - -(-size // parts)
    emptied.give_back()  # no effect any more
    assert manager.memory_pool.buffer_id_to_uid[second.index] is second
    assert any(bool((buffer[second.index] == 1.0).any()) for buffer in buffers)


@pytest.mark.usefixtures("stays")
@pytest.mark.parametrize(
    ("left_bytes", "empty_bytes", "num_bytes", "is_used"),
    [
        (3 << 30, 0, 3 << 30, True),
        (3 << 30, (3 << 30) - 1, 3 << 30, True),
        (3 << 30, 3 << 30, 3 << 30, False),  # an empty slot has as much
        (slots.RELEASED_BYTES + 5, 0, 5, True),
        (slots.RELEASED_BYTES + 6, 0, 5, False),  # more than a slot keeps beside its adapter
        (3 << 30, 0, 0, False),  # it is not known how much the adapter needs
    ],
)
def test_an_emptied_slot_comes_first_if_it_has_memory_that_the_adapter_needs(
    manager: Any,
    written: dict[int, int],
    left_bytes: int,
    empty_bytes: int,
    num_bytes: int,
    is_used: bool,
) -> None:
    manager.fetch_new_loras({None})
    emptied = slots.reserve(manager)
    assert emptied is not None
    written[emptied.index] = left_bytes
    emptied.empty()
    others = {index for index, uid in enumerate(manager.memory_pool.buffer_id_to_uid) if uid == EMPTY_SLOT}
    assert len(others) == 2
    written.update(dict.fromkeys(others, empty_bytes))
    slot = slots.reserve(manager, num_bytes=num_bytes)
    assert slot is not None and (slot.index == emptied.index) == emptied.is_lost == is_used


@pytest.mark.usefixtures("stays", "written")
def test_a_batch_takes_an_emptied_slot_before_one_that_is_filled(manager: Any) -> None:
    """Though the other one was reserved earlier."""
    manager.fetch_new_loras({None})
    filled, emptied, kept = (slots.reserve(manager) for _ in range(3))
    assert filled is not None and emptied is not None and kept is not None
    emptied.empty()
    slots.make_room(manager.memory_pool, {None, "new"})
    assert (filled.is_lost, emptied.is_lost, kept.is_lost) == (False, True, False)


def test_slots_keep_memory_that_their_adapters_do_not_need_up_to_a_bound(
    served: SimpleNamespace,
    manager: Any,
    adapter: AdapterTensors,
    written: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In all slots: what one slot keeps, another one may not."""
    released: list[int] = []
    real = slots.release_parts

    def release_parts(pool: Any, index: int) -> list[Callable[[], None]]:
        released.append(index)
        return real(pool, index)

    monkeypatch.setattr(slots, "release_parts", release_parts)
    built = prepare_adapter(manager, served.config, "name", adapter).adapter
    each = pool_module.slot_bytes(manager.memory_pool, built)
    large = slots.MOST_SPARE_BYTES // 2

    def filled() -> slots.ReservedSlot:
        slot = slots.reserve(manager)
        assert slot is not None
        written[slot.index] = large + each
        slot.fill(built)
        return slot

    filled()
    assert len(released) == 1 and pool_module.spare_bytes(manager.memory_pool) == 0  # before `keep_memory`
    slots.keep_memory(manager.memory_pool)
    kept = filled()
    assert len(released) == 1 and pool_module.spare_bytes(manager.memory_pool) == large
    third = slots.reserve(manager)
    assert third is not None
    written[third.index] = large + each + 1
    assert not third.fill_at_once(built)
    third.fill(built)
    assert released[1:] == [third.index] and pool_module.spare_bytes(manager.memory_pool) == large
    kept.give_back()  # of no adapter now: all that it has is spare
    assert pool_module.spare_bytes(manager.memory_pool) == large + each
