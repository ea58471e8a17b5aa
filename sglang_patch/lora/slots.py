"""Slots of SGLang's LoRA memory pool that background threads fill, and the memory that all slots have.

Symbols (SGLang 0.5.23): `LoRAMemoryPool.prepare_lora_batch`; read and written: `.uid_to_buffer_id`,
`.buffer_id_to_uid`, `.eviction_policy`; called: `LoRAManager._notify_lora_slots_updated`. Reason: SGLang copies an
adapter into a slot in the scheduler's thread, in the first batch that uses it. Every stream waits for that copy.

**Who gets a slot.** An empty one, else that of the least recently used adapter that no request uses: it stays in host
memory, and comes back when a request asks for it (`staging.py`). Before a batch takes a slot from another adapter, the
reserved ones are given back, so that a reservation never leaves a batch without a slot. An adapter whose slot was given
back is filled in again for its first request, or copied in its first batch where the pool is not in host memory.

**Memory.** The pool's host memory is committed by use (`pool.py`), which takes longer than copying an adapter into it.
So slots keep memory that their adapters don't need, or that a dropped adapter had, up to `MOST_SPARE_BYTES` in all.
With a budget (`--lora-memory`) it is up to `RELEASED_BYTES`, and the least recently used adapters leave their slots
until the rest fits. Adapters in use stay; requests for others wait (`staging.py`). The pages of an emptied slot are
given back slowly on another thread (`spare.py`). The slot may be used before all of them are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from kt_runtime import device
from kt_runtime.adapters.tensors import on_threads
from kt_runtime.beside import pause
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.lora.adapter import InstalledAdapter
from kt_runtime.sglang_patch.lora.pool import (
    copies_into,
    note_empty,
    note_written,
    release_parts,
    slot_bytes,
    spare_bytes,
    written_bytes,
)
from kt_runtime.spare import Leaving, give_back

RELEASED_BYTES = 64 << 20
"""A slot that has less memory than that beyond what its adapter needs keeps it always."""
AT_ONCE_BYTES = 32 << 20
"""Most bytes of a slot that the engine's thread fills itself, which takes it 10 to 20 ms; a larger adapter goes to a
background thread. An adapter of a low rank takes more in a slot than in its file: B has as many columns as
the server's highest rank."""
MOST_SPARE_BYTES = 512 << 20
"""Memory that all slots together may keep beyond what their adapters need. A session that publishes again and again
alternates between two slots."""

POOL = "sglang.srt.lora.mem_pool.LoRAMemoryPool"
SYMBOLS = (
    f"{POOL}.prepare_lora_batch",
    f"{POOL}.uid_to_buffer_id",
    f"{POOL}.buffer_id_to_uid",
    f"{POOL}.eviction_policy",
    "sglang.srt.lora.mem_pool.EMPTY_SLOT",
    "sglang.srt.lora.lora_manager.LoRAManager._notify_lora_slots_updated",
)


class ReservedSlot:
    """One slot of `pool`. The engine's thread calls every method except `fill`, which one worker thread calls once, if
    the engine's thread calls neither `fill_at_once` nor `empty`.

    `is_awaited`: a request waits for it, so it is the last to be given back. `leaving`: the memory of an emptied
    slot, which another adapter may have at once; None if it was not emptied.
    """

    def __init__(self, pool: Any, index: int, *, is_awaited: bool = False) -> None:
        self.index, self._pool, self.is_awaited = index, pool, is_awaited
        self._lock = threading.Condition()
        self._copying, self._is_lost, self._is_filled = 0, False, False
        self.leaving: Leaving | None = None
        pool.buffer_id_to_uid[index] = self
        _reserved(pool).append(self)

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def fill(self, adapter: InstalledAdapter) -> None:
        """Copies `adapter` into the slot, on several threads; stops if the slot is given back meanwhile."""
        if self._has_too_much(adapter):
            for part in release_parts(self._pool, self.index):
                self._copy(part)
        note_written(self._pool, self.index, adapter)
        on_threads(self._copy, copies_into(self._pool, self.index, adapter), slot_bytes(self._pool, adapter))
        self._is_filled = True

    def fill_at_once(self, adapter: InstalledAdapter) -> bool:
        """As `fill`, on the engine's thread. False: it would take too long, and the slot is not filled."""
        if slot_bytes(self._pool, adapter) > AT_ONCE_BYTES or self._has_too_much(adapter):
            return False
        note_written(self._pool, self.index, adapter)
        for copy in copies_into(self._pool, self.index, adapter):
            self._copy(copy)
        self._is_filled = True
        return True

    def _has_too_much(self, adapter: InstalledAdapter) -> bool:
        """Memory that must be given back first."""
        written, needed = written_bytes(self._pool, self.index), slot_bytes(self._pool, adapter)
        return written > needed + RELEASED_BYTES and spare_bytes(self._pool) - needed > most_spare_bytes(self._pool)

    def empty(self) -> Leaving:
        """Gives the slot's pages back on another thread, slowly; stops if the slot is given back meanwhile."""
        num_bytes = written_bytes(self._pool, self.index)
        parts = [partial(self._copy, part) for part in release_parts(self._pool, self.index)]
        self.leaving = give_back(parts, num_bytes)
        return self.leaving

    def _copy(self, copy: Callable[[], None]) -> bool:
        """False, and nothing is done, if the slot was given back."""
        pause()
        with self._lock:
            if self._is_lost:
                return False
            self._copying += 1
        try:
            with torch.inference_mode():
                copy()
        finally:
            with self._lock:
                self._copying -= 1
                self._lock.notify_all()
        return True

    def give_back(self) -> None:
        """The slot is empty again. Waits for the copies under way, of one linear each. No effect after `use`."""
        from sglang.srt.lora.mem_pool import EMPTY_SLOT

        left_bytes = 0 if self.leaving is None else self.leaving.left_bytes  # none, once the other thread has noticed
        with self._lock:
            self._is_lost = True
            self._lock.wait_for(lambda: not self._copying)
        if self in _reserved(self._pool):
            _reserved(self._pool).remove(self)
            self._pool.buffer_id_to_uid[self.index] = EMPTY_SLOT
            note_empty(self._pool, self.index, left_bytes)

    def use(self, manager: Any, lora_id: str) -> bool:
        """Makes the slot that of `lora_id`; False if it was given back or is not filled."""
        if self not in _reserved(self._pool) or not self._is_filled or lora_id in self._pool.uid_to_buffer_id:
            return False
        _reserved(self._pool).remove(self)
        self._pool.buffer_id_to_uid[self.index] = lora_id
        self._pool.uid_to_buffer_id[lora_id] = self.index
        self._pool.eviction_policy.mark_used(lora_id)
        manager._notify_lora_slots_updated({self.index})
        return True


def install(hooks: Hooks) -> None:
    hooks.before(SYMBOLS[0], make_room)


def most_spare_bytes(pool: Any) -> int:
    """`RELEASED_BYTES` before `keep_memory`."""
    return int(getattr(pool, "kt_most_spare", RELEASED_BYTES))


def keep_memory(pool: Any) -> None:
    """From now on slots keep up to `MOST_SPARE_BYTES` that their adapters don't need."""
    pool.kt_most_spare = MOST_SPARE_BYTES


def is_in_host_memory(manager: Any) -> bool:
    return device.is_host(torch.device(manager.device))


def reserve(
    manager: Any, in_use: Collection[str | None] | None = None, *, is_awaited: bool = False, num_bytes: int = 0
) -> ReservedSlot | None:
    """An empty slot, else one whose pages are given back, else that of the least recently used adapter that is not
    `in_use` (None: all adapters are).

    Of several empty slots it is the one that has most memory, which the next adapter then need not commit. For the same
    reason a slot whose pages are given back is preferred if it has more memory than those, and not much more than
    `num_bytes`, the adapter's.
    None if there is no such slot, or if the pool is not in host memory.
    """
    from sglang.srt.lora.mem_pool import EMPTY_SLOT

    pool = manager.memory_pool
    if not is_in_host_memory(manager):
        return None
    empty = {index: written_bytes(pool, index) for index, uid in enumerate(pool.buffer_id_to_uid) if uid == EMPTY_SLOT}
    emptied = [(slot.leaving.left_bytes, slot) for slot in _reserved(pool) if slot.leaving is not None]
    if empty:
        most = max(empty.values())
        emptied = [each for each in emptied if most < each[0] <= num_bytes + RELEASED_BYTES]
    if emptied:
        _, slot = max(emptied, key=lambda each: each[0])
        slot.give_back()
        index: int | None = slot.index
    else:
        index = max(empty, key=lambda each: empty[each], default=None)
    if index is None and in_use is not None:
        index = _evict(manager, in_use)
    return None if index is None else ReservedSlot(pool, index, is_awaited=is_awaited)


def _evict(manager: Any, in_use: Collection[str | None]) -> int | None:
    """The slot that the least recently used of the other adapters had; it has no owner now. None: there is none."""
    pool = manager.memory_pool
    pinned = {uid for uid, reference in manager.lora_refs.items() if reference.pinned}
    candidates = {uid for uid in pool.uid_to_buffer_id if uid not in in_use} - pinned
    if not candidates:
        return None
    candidates = candidates - {None} or candidates  # the base has a slot too; it leaves last, as in SGLang
    victim = pool.eviction_policy.select_victim(candidates)
    index: int = pool.uid_to_buffer_id.pop(victim)
    pool.eviction_policy.remove(victim)
    note_empty(pool, index)
    return index


def make_room(pool: Any, cur_uids: Collection[str | None], **others: Any) -> None:
    """Gives reserved slots back while the batch needs more slots than are empty: those without an adapter first, then
    the oldest. Those that requests await only if there is no other adapter whose slot SGLang can take."""
    from sglang.srt.lora.mem_pool import EMPTY_SLOT

    reserved = _reserved(pool)
    if not reserved:
        return
    needed = sum(uid not in pool.uid_to_buffer_id for uid in cur_uids)
    pinned = {uid for uid, reference in others.get("lora_refs", {}).items() if reference.pinned}
    others_in_slots = sum(uid is not None and uid not in cur_uids for uid in pool.uid_to_buffer_id.keys() - pinned)
    while reserved and needed > (empty := sum(uid == EMPTY_SLOT for uid in pool.buffer_id_to_uid)):
        slot = next((slot for slot in reserved if slot.leaving is not None), None)
        slot = slot or next((slot for slot in reserved if not slot.is_awaited), None)
        if slot is None and needed <= empty + others_in_slots:
            return
        (slot or reserved[0]).give_back()


def trim(manager: Any, in_use: Collection[str | None], budget_bytes: int) -> list[ReservedSlot]:
    """Takes the least recently used adapters that are not `in_use` out of their slots, until the rest fits.

    Returns the slots, to `empty` and to give back then.
    """
    pool, emptied = manager.memory_pool, []
    while used_bytes(manager, pool.uid_to_buffer_id) > budget_bytes:
        index = _evict(manager, {None, *in_use})
        if index is None:
            break
        emptied.append(ReservedSlot(pool, index))
    return emptied


def has_reserved(manager: Any) -> bool:
    return bool(_reserved(manager.memory_pool))


def used_bytes(manager: Any, uids: Collection[str | None]) -> int:
    """Bytes of the pool that these adapters occupy in slots."""
    adapters = (manager.loras.get(uid) for uid in uids)
    return sum(slot_bytes(manager.memory_pool, each) for each in adapters if isinstance(each, InstalledAdapter))


def _reserved(pool: Any) -> list[ReservedSlot]:
    found: list[ReservedSlot] | None = getattr(pool, "kt_reserved", None)
    if found is None:
        found = pool.kt_reserved = []
    return found
