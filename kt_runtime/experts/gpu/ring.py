"""Streams the experts of a layer to the device through two slots: one is filled while the device computes with the
other.

A loader thread dequantizes the next chunk of experts from the store into pinned memory and queues its copy on a stream
of its own. Three waits keep the order:

    ready      the caller's stream waits for the copy before it reads a slot
    consumed   the copy waits for the caller's work on the chunk that was in the slot before
    copied     the loader waits for the last copy out of a pinned buffer before it overwrites it

On the host ("a device" of the tests) copies are immediate, and only the hand-over between the two threads is left.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from kt_runtime import device as devices
from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.experts.gpu.sizes import NUM_SLOTS, ring_bytes
from kt_runtime.experts.values import ExpertShape


class UnpackingLayer(Protocol):
    """An `ExpertLayer`, of which the ring uses this alone."""

    def unpack_range(self, first: int, count: int, w13: Tensor, w2: Tensor) -> None: ...


@dataclass(frozen=True)
class Chunk:
    """Experts on the device: w13 [n, 2I, H], w2 [n, H, I]. Valid until the next chunk is asked for."""

    experts: Sequence[int]
    w13: Tensor
    w2: Tensor


class ExpertRing:
    """`device`: where the slots are. `chunk_experts`: experts of a slot. One pass at a time; other threads wait.

    Memory: `NUM_SLOTS` chunks on the device and as much pinned memory of the host (`num_bytes` each).
    """

    def __init__(self, device: torch.device, shape: ExpertShape, chunk_experts: int) -> None:
        if not 1 <= chunk_experts <= shape.num_experts:
            raise InvalidValueError(f"chunks of {chunk_experts} experts; allowed: 1 to {shape.num_experts}")
        self.device, self.shape, self.chunk_experts = device, shape, chunk_experts
        self.num_bytes = ring_bytes(shape, chunk_experts)
        self._stream = None if devices.is_host(device) else devices.new_stream(device)
        with torch.inference_mode(False):  # a tensor made in inference mode can't be written outside of it
            self._slots = [_Slot(device, shape, chunk_experts) for _ in range(NUM_SLOTS)]
        self._one_pass = threading.Lock()
        self._passes: SimpleQueue[_Pass | None] = SimpleQueue()
        self._loader: threading.Thread | None = None
        self._closed = False

    def chunks(self, layer: UnpackingLayer, experts: Sequence[int]) -> Generator[Chunk, None, None]:
        """`experts`, ascending, in chunks, ready in the order of the caller's current stream. Close it when leaving
        early (`contextlib.closing`).

        The device's work on a chunk has to be queued on the current stream before the next one is asked for. What the
        loader raises is raised here; the ring stays usable. ConflictError: the ring is closed.
        """
        with self._one_pass:
            if self._closed:
                raise ConflictError("the ring of experts is closed")
            self._start_loader()
            size = self.chunk_experts
            passed = _Pass(layer, [experts[at : at + size] for at in range(0, len(experts), size)])
            self._passes.put(passed)
            try:
                for loaded in passed.chunks:
                    slot = passed.next_slot()
                    self._await_ready(slot)
                    try:
                        yield Chunk(loaded, slot.w13[: len(loaded)], slot.w2[: len(loaded)])
                    finally:
                        self._mark_consumed(slot)
                        passed.free.release()
            finally:
                passed.stop()

    def close(self) -> None:
        """Waits for a running pass, ends the loader thread and frees the memory. Closing twice is allowed."""
        with self._one_pass:
            self._closed = True
            if self._loader is not None:
                self._passes.put(None)
                self._loader.join()
                self._loader = None
            if self._stream is not None:
                self._stream.synchronize()
            self._slots = []

    def _start_loader(self) -> None:
        if self._loader is None:
            self._loader = threading.Thread(target=self._load_passes, name="kt-expert-loader", daemon=True)
            self._loader.start()

    def _load_passes(self) -> None:
        while (passed := self._passes.get()) is not None:
            try:
                for index, experts in enumerate(passed.chunks):
                    passed.free.acquire()
                    if passed.stopped:
                        break
                    slot = self._slots[index % NUM_SLOTS]
                    self._fill(slot, passed.layer, experts)
                    passed.loaded.put(slot)
            except BaseException as error:  # noqa: BLE001 - handed on: the caller raises it
                passed.loaded.put(error)
            finally:
                passed.done.set()

    def _fill(self, slot: _Slot, layer: UnpackingLayer, experts: Sequence[int]) -> None:
        self._await_copied(slot)
        for at, first, count in runs_of(experts):
            layer.unpack_range(first, count, slot.host_w13[at : at + count], slot.host_w2[at : at + count])
        pairs = ((slot.w13, slot.host_w13), (slot.w2, slot.host_w2))
        if self._stream is None:
            for on_device, on_host in pairs:
                on_device[: len(experts)].copy_(on_host[: len(experts)])
            return
        with devices.on(self._stream):
            self._await_consumed(slot)
            for on_device, on_host in pairs:
                on_device[: len(experts)].copy_(on_host[: len(experts)], non_blocking=True)
            slot.ready = devices.recorded(self._stream)

    def _await_copied(self, slot: _Slot) -> None:
        if slot.ready is not None:
            slot.ready.synchronize()

    def _await_consumed(self, slot: _Slot) -> None:
        if slot.consumed is not None and self._stream is not None:
            self._stream.wait_event(slot.consumed)

    def _await_ready(self, slot: _Slot) -> None:
        if slot.ready is not None:
            devices.current_stream(self.device).wait_event(slot.ready)

    def _mark_consumed(self, slot: _Slot) -> None:
        if self._stream is not None:
            slot.consumed = devices.recorded(device=self.device)


class _Slot:
    """`ready`: the last copy into the slot, which is also the last one out of its pinned memory. `consumed`: the
    caller's work on it. None: there was none, or the device is the host."""

    def __init__(self, device: torch.device, shape: ExpertShape, experts: int) -> None:
        gate_up, down = (experts, 2 * shape.intermediate, shape.hidden), (experts, shape.hidden, shape.intermediate)
        self.w13, self.w2 = (torch.empty(size, dtype=torch.bfloat16, device=device) for size in (gate_up, down))
        self.host_w13, self.host_w2 = (_pinned(size) for size in (gate_up, down))
        self.ready: torch.Event | None = None
        self.consumed: torch.Event | None = None


def _pinned(shape: tuple[int, int, int]) -> Tensor:
    experts, rows, columns = shape
    return devices.pinned(experts * rows * columns * torch.bfloat16.itemsize).view(torch.bfloat16).view(shape)


@dataclass
class _Pass:
    """One walk over a layer. `free`: slots that the loader may fill. `loaded`: filled slots, or what went wrong."""

    layer: UnpackingLayer
    chunks: Sequence[Sequence[int]]
    free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(NUM_SLOTS))
    loaded: SimpleQueue[_Slot | BaseException] = field(default_factory=SimpleQueue)
    stopped: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def next_slot(self) -> _Slot:
        slot = self.loaded.get()
        if isinstance(slot, BaseException):
            raise slot
        return slot

    def stop(self) -> None:
        """Returns when the loader has finished this pass."""
        self.stopped = True
        self.free.release()
        self.done.wait()


def runs_of(experts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in `experts`, first expert, number of experts) of each run of consecutive numbers."""
    begin = 0
    for at in range(1, len(experts) + 1):
        if at == len(experts) or experts[at] != experts[at - 1] + 1:
            yield begin, experts[begin], at - begin
            begin = at
