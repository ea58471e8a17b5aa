"""Copies an adapter that has no slot into one, on a background thread, while the request that needs it waits.

Symbols (SGLang 0.5.23): `Scheduler.can_schedule_lora_req`, `._get_new_batch_prefill_raw`, and what `slots.py` names;
read: `Scheduler.waiting_queue`, `.forward_ct`. Reason: SGLang copies an adapter into a slot in the scheduler's thread,
in the first batch that uses it; every stream waits for that copy, a second for an adapter of gigabytes. Its own
overlapped loading needs an accelerator's streams. Here the request stays in the waiting queue while a thread copies.
Adapters of at most `INLINE_BYTES` are copied in their batch, unless they take much more in a slot: they take less time
than a decode step.

The adapters that are being brought in, and those that have just come for a request, count as running ones: nothing
takes their slots. With a budget (`slots.py`), a request also waits if its adapter does not fit together with those in
use, but not without end (`overtaking.py`).

With several ranks every adapter is copied in its batch: threads end at other times on each rank, and what a batch may
hold must not depend on that. Which adapters are in slots follows from the batches that rank 0 has formed, so it is
equal on all ranks. A slot whose pages a thread gives back counts as empty for a batch that needs it (`make_room`).

Everything here runs in the scheduler's thread, except the copies.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kt_runtime.adapters.tensors import give_way
from kt_runtime.resident.wakeup import Wakeup
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.lora import slots
from kt_runtime.sglang_patch.lora.adapter import InstalledAdapter
from kt_runtime.sglang_patch.lora.overtaking import Overtaking
from kt_runtime.sglang_patch.lora.pool import note_empty, slot_bytes, spare_bytes, written_bytes
from kt_runtime.sglang_patch.ranks import group

logger = logging.getLogger(__name__)

SYMBOLS = (
    "sglang.srt.managers.scheduler.Scheduler.can_schedule_lora_req",
    "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
    "sglang.srt.lora.lora_manager.LoRAManager.validate_lora_batch",
)
INLINE_BYTES = 2 << 20
KEPT_SECONDS = 1.0
"""An adapter that was brought in for a request keeps its slot so long, or until the request runs."""
IDLE_WAIT_SECONDS = 0.002
"""Where nothing else can run, the scheduler's thread waits for a copy instead of asking again at once."""


class Staging:
    """Adapters of one LoRA manager. `budget_bytes`: of the pool's memory; None: as many adapters as there are slots."""

    def __init__(self, manager: Any, budget_bytes: int | None = None) -> None:
        self._manager, self.budget_bytes = manager, budget_bytes
        self._threads = ThreadPoolExecutor(1, "kt-lora-slot", give_way)
        self._fills: dict[str, tuple[slots.ReservedSlot, Future[None]]] = {}
        self._emptied: list[tuple[slots.ReservedSlot, Future[None]]] = []
        self._came: dict[str, float] = {}
        self._present: set[str | None] = set()
        self.wakeup = Wakeup()
        self.overtaking = Overtaking(self._could_hold, lambda each: each in self._fills or each in self._came)
        if budget_bytes is None and slots.is_in_host_memory(manager):
            slots.keep_memory(manager.memory_pool)

    def may_run(self, lora_id: str | None, running: set[str | None]) -> bool | None:
        """Whether the adapter is in a slot or can be copied in its batch. None: SGLang decides. `running`: ids."""
        self.settle(running)
        if lora_id in running:
            return None
        adapter = self._manager.loras.get(lora_id)
        if lora_id in self._fills:
            if not running:
                self._wait(lora_id)
            return None if self._is_ready(lora_id) else False
        taken = running | self._fills.keys() | self._came.keys()
        if not self._manager.validate_lora_batch({lora_id} | taken):
            return False
        if not isinstance(adapter, InstalledAdapter) or self._is_ready(lora_id):
            return None
        if not self._fits_memory({lora_id, *taken}):
            return False
        is_copied_in_batch = self._is_small(adapter) or not slots.is_in_host_memory(self._manager)
        if is_copied_in_batch or group.num_ranks() > 1:
            return None
        assert lora_id is not None
        num_bytes = slot_bytes(self._manager.memory_pool, adapter)
        slot = slots.reserve(self._manager, taken, is_awaited=True, num_bytes=num_bytes)
        if slot is None:
            return False if slots.has_reserved(self._manager) else None
        self._fills[lora_id] = slot, self._threads.submit(slot.fill, adapter)
        self._fills[lora_id][1].add_done_callback(lambda _: self.wakeup.set())
        return False

    def settle(self, running: set[str | None] | frozenset[str | None] = frozenset()) -> None:
        """Takes over the copies that have ended, and gives emptied slots back. `running`: ids that batches use."""
        self.wakeup.clear()
        now = time.monotonic()
        for lora_id in [each for each, (_, copied) in self._fills.items() if copied.done()]:
            slot, copied = self._fills.pop(lora_id)
            if copied.exception() is None and lora_id in self._manager.loras and slot.use(self._manager, lora_id):
                self._came[lora_id] = now
                logger.info("adapter %s is in slot %d of a batch again", lora_id, slot.index)
            else:
                slot.give_back()
        self._came = {
            each: since for each, since in self._came.items() if each not in running and now < since + KEPT_SECONDS
        }
        for slot, released in self._emptied:
            if released.done():
                slot.give_back()
        self._emptied = [(slot, released) for slot, released in self._emptied if not released.done()]

    def turn(self, in_use: Callable[[], set[str]]) -> None:
        """Called between two batches. Moves adapters out of slots until the rest is within the budget. `in_use`: ids of
        running and waiting requests."""
        if self._fills or self._emptied:
            self.settle()
        present = set(self._manager.memory_pool.uid_to_buffer_id)
        if self.budget_bytes is not None and present != self._present:
            for slot in slots.trim(self._manager, self.kept(in_use()), self.budget_bytes):
                self._release(slot)
            self._present = set(self._manager.memory_pool.uid_to_buffer_id)
            if left := present - self._present:
                logger.info("adapters left their slots, of which %d bytes may be used: %s", self.budget_bytes, left)

    def kept(self, in_use: set[str]) -> set[str | None]:
        """The adapters that keep their slots."""
        return {*in_use, *self._fills, *self._came}

    def dropped(self, index: int) -> None:
        """The adapter of this slot, which is empty now, was dropped."""
        pool = self._manager.memory_pool
        note_empty(pool, index)
        if not slots.is_in_host_memory(self._manager) or written_bytes(pool, index) < slots.RELEASED_BYTES:
            return
        if spare_bytes(pool) > slots.most_spare_bytes(pool) and group.num_ranks() == 1:
            self._release(slots.ReservedSlot(pool, index))

    def forget(self, lora_id: str) -> None:
        """The adapter is going to be dropped."""
        self._came.pop(lora_id, None)
        found = self._fills.pop(lora_id, None)
        if found is not None:
            found[0].give_back()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self.wakeup.close()

    def _release(self, slot: slots.ReservedSlot) -> None:
        released = slot.empty().ended
        released.add_done_callback(lambda _: self.wakeup.set())
        self._emptied.append((slot, released))

    def _wait(self, lora_id: str | None) -> None:
        assert lora_id is not None
        with contextlib.suppress(TimeoutError):
            self._fills[lora_id][1].exception(IDLE_WAIT_SECONDS)
            self.settle()

    def _is_ready(self, lora_id: str | None) -> bool:
        return lora_id in self._manager.memory_pool.uid_to_buffer_id

    def _is_small(self, adapter: InstalledAdapter) -> bool:
        in_slot = slot_bytes(self._manager.memory_pool, adapter)
        return adapter.num_bytes <= INLINE_BYTES and in_slot <= slots.AT_ONCE_BYTES

    def _fits_memory(self, adapters: set[str | None]) -> bool:
        """Whether all of them are within the budget; a single one may exceed it."""
        if self.budget_bytes is None or len(adapters - {None}) <= 1:
            return True
        return slots.used_bytes(self._manager, adapters) <= self.budget_bytes

    def _could_hold(self, adapters: set[str | None]) -> bool:
        """Whether slots could have all of them at once."""
        return bool(self._manager.validate_lora_batch(adapters)) and self._fits_memory(adapters)


_staging: Staging | None = None


def install(hooks: Hooks) -> None:
    hooks.around(SYMBOLS[0], can_schedule)
    hooks.before(SYMBOLS[1], begin_pass)


def start(manager: Any, budget_bytes: int | None) -> Staging:
    """From now on requests wait for adapters that are being brought in."""
    global _staging
    _staging = Staging(manager, budget_bytes)
    return _staging


def of(manager: Any) -> Staging | None:
    """None if it was not started for this manager."""
    return _staging if _staging is not None and _staging._manager is manager else None


def begin_pass(scheduler: Any, *_: Any, running_batch: Any, **__: Any) -> None:
    staging = of(scheduler.tp_worker.model_runner.lora_manager)
    if staging is not None:
        running = [request for request in running_batch.reqs if not request.finished()]
        staging.overtaking.begin(scheduler.forward_ct, scheduler.waiting_queue, running)


def can_schedule(original: Callable[..., bool], scheduler: Any, req: Any, running_loras: set[str | None]) -> bool:
    staging = of(scheduler.tp_worker.model_runner.lora_manager)
    if staging is None:
        return original(scheduler, req, running_loras)
    answer: bool | None = False
    if staging.overtaking.allows(req.lora_id):
        answer = staging.may_run(req.lora_id, running_loras)
        if answer is None:
            answer = original(scheduler, req, running_loras)
    if not answer:
        staging.overtaking.note_refused(scheduler.forward_ct, req)
    return bool(answer)
