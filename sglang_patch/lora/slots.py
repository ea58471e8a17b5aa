"""Slots of SGLang's LoRA memory pool that are filled before their adapter's first request, beside the engine's thread.

Symbols (SGLang 0.5.23): `LoRAMemoryPool.prepare_lora_batch`; read and written: `.uid_to_buffer_id`,
`.buffer_id_to_uid`, `.eviction_policy`; called: `LoRAManager._notify_lora_slots_updated`. Reason: SGLang copies an
adapter into a slot in the scheduler's thread, in the first batch that uses it. Every stream waits for that copy.

Only empty slots are reserved. Before a batch takes a slot from another adapter, the reserved ones are given back, so
that a reservation never displaces an adapter and never leaves a batch without a slot. An adapter whose slot was given
back is copied in its first batch, as all adapters are where the pool is not in host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import torch

from kt_runtime import device
from kt_runtime.adapters.tensors import on_threads
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.lora.adapter import InstalledAdapter
from kt_runtime.sglang_patch.lora.pool import copies_into

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
    """One slot of `pool`. The engine's thread calls every method except `fill`, which one worker thread calls once."""

    def __init__(self, pool: Any, index: int) -> None:
        self.index, self._pool = index, pool
        self._lock = threading.Condition()
        self._copying, self._is_lost, self._is_filled = 0, False, False
        pool.buffer_id_to_uid[index] = self
        _reserved(pool).append(self)

    def fill(self, adapter: InstalledAdapter) -> None:
        """Copies `adapter` into the slot, on several threads; stops if the slot is given back meanwhile."""
        on_threads(self._copy, copies_into(self._pool, self.index, adapter))
        self._is_filled = True

    def _copy(self, copy: Callable[[], None]) -> None:
        with self._lock:
            if self._is_lost:
                return
            self._copying += 1
        try:
            with torch.inference_mode():
                copy()
        finally:
            with self._lock:
                self._copying -= 1
                self._lock.notify_all()

    def give_back(self) -> None:
        """The slot is empty again. Waits for the copies under way, of one linear each. No effect after `use`."""
        from sglang.srt.lora.mem_pool import EMPTY_SLOT

        with self._lock:
            self._is_lost = True
            self._lock.wait_for(lambda: not self._copying)
        if self in _reserved(self._pool):
            _reserved(self._pool).remove(self)
            self._pool.buffer_id_to_uid[self.index] = EMPTY_SLOT

    def use(self, manager: Any, lora_id: str) -> bool:
        """Makes the slot that of `lora_id`; False if it was given back or is not filled."""
        if self not in _reserved(self._pool) or not self._is_filled:
            return False
        _reserved(self._pool).remove(self)
        self._pool.buffer_id_to_uid[self.index] = lora_id
        self._pool.uid_to_buffer_id[lora_id] = self.index
        self._pool.eviction_policy.mark_used(lora_id)
        manager._notify_lora_slots_updated({self.index})
        return True


def install(hooks: Hooks) -> None:
    hooks.before(SYMBOLS[0], make_room)


def reserve(manager: Any) -> ReservedSlot | None:
    """None if no slot is empty, or if the pool is not in host memory."""
    from sglang.srt.lora.mem_pool import EMPTY_SLOT

    pool = manager.memory_pool
    if not device.is_host(torch.device(manager.device)):
        return None
    index = next((index for index, uid in enumerate(pool.buffer_id_to_uid) if uid == EMPTY_SLOT), None)
    return None if index is None else ReservedSlot(pool, index)


def make_room(pool: Any, cur_uids: Collection[str | None], **others: Any) -> None:
    """Gives reserved slots back, the oldest first, while the batch needs more slots than are empty."""
    from sglang.srt.lora.mem_pool import EMPTY_SLOT

    reserved = _reserved(pool)
    if not reserved:
        return
    needed = sum(uid not in pool.uid_to_buffer_id for uid in cur_uids)
    while reserved and needed > sum(uid == EMPTY_SLOT for uid in pool.buffer_id_to_uid):
        reserved[0].give_back()


def _reserved(pool: Any) -> list[ReservedSlot]:
    found: list[ReservedSlot] | None = getattr(pool, "kt_reserved", None)
    if found is None:
        found = pool.kt_reserved = []
    return found
