"""Routed experts of a layer whose hidden states are on an accelerator: an eager break between captured segments.

Symbols (SGLang 0.5.23): `eager_on_graph`, which is called. Reason: the host computes the experts, which no graph can
hold. While SGLang captures a breakable graph, a break ends the segment, runs a stub and starts the next segment; at a
replay the host launches a segment, runs the break and launches the next. Without a graph a break is a plain call.

    captured: attention, router | break: experts | captured: next layer ...                        (Qwen3-MoE)
    captured: attention, router | break: begin | captured: shared experts | break: finish | ...    (DeepSeek)

**Arguments of a break** are those of its capture: tensors of the graph's own memory, which each replay refills, and
objects of this process. So everything that belongs to a batch is looked up when the break runs: the number of rows that
are tokens (`replays`), and the adapters with each token's slot (`adapters`). The result is written in place into a
tensor of the graph, which the following segment reads. Rows of padding are not computed; they become zeros.

**Overlap.** `begin` records an event after the router and returns, so that the device has the shared experts queued
before the host waits. `finish` works on a stream of its own, which waits for that event only: its copies to the host do
not stand behind the shared experts, and the host waits for these copies, not for the device. At its end the stream of
the model waits for the result's copy. Experts on the device (hot ones, or streamed ones) are queued there too.

**Pinned buffers.** Each captured decode size has a set of its own, allocated at its capture and kept: a decode step
allocates nothing, and never waits for the copies of another size. All prefills share the thread's growing buffers,
as eager passes do: for 30 prefill sizes separate sets would pin hundreds of megabytes. A buffer of a result is not
written before its last copy to the device has ended (`device.PinnedBuffer`), whichever stream made it.

Warm-ups before a capture compute nothing either: their results are not read, and prefills of all sizes would take
minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kt_runtime import device
from kt_runtime.errors import ConflictError
from kt_runtime.experts import LoraSlot
from kt_runtime.experts.gpu import staging
from kt_runtime.sglang_patch.gpu import replays

SYMBOLS = ("sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.eager_on_graph",)

Adapters = Callable[[int], tuple[Sequence[LoraSlot], Tensor | None]]
"""Given the batch's number of tokens: its adapters, and int32 [T] on the device, each token's adapter or -1."""


Compute = Callable[[Tensor, Tensor, Tensor, Sequence[LoraSlot], Tensor | None, Tensor], Tensor]
"""The layer's experts: of x [T, H], ids and weights [T, K], adapters and token_slots; writes to the last, [T, H]. All
tensors are on one device."""


@dataclass
class Begun:
    """A call between its two breaks. `routed`: the event after the router, of the last time that `begin` ran."""

    routed: torch.Event | None = None


@dataclass(frozen=True, slots=True)
class _Breaks:
    """The functions below, as SGLang's breaks."""

    at_once: Callable[..., None]
    begin: Callable[..., None]
    finish: Callable[..., None]


_sets: dict[int, staging.StagingBuffers] = {}  # by captured decode size
_streams: dict[torch.device, torch.Stream] = {}
_deferred: list[Callable[[], None]] | None = None  # inside `deferring`: the call that is to be finished


def forward(compute: Compute, x: Tensor, ids: Tensor, weights: Tensor, adapters: Adapters) -> Tensor:
    """[T, H] -> [T, H] on x's device. Inside `deferring` the result is complete once `finish_deferred` was called."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    breaks = _breaks()
    if _deferred is None:
        breaks.at_once(compute, adapters, x, ids, weights, out)
        return out
    if _deferred:
        raise ConflictError("the experts of a layer were called again before their first call was finished")
    begun = Begun()
    breaks.begin(begun, x)
    _deferred.append(lambda: breaks.finish(begun, compute, adapters, x, ids, weights, out))
    return out


@contextmanager
def deferring() -> Iterator[None]:
    """Calls inside are split. Each must be finished before the next and before the end; else ConflictError."""
    global _deferred
    before, _deferred = _deferred, []
    try:
        yield
        if _deferred:
            raise ConflictError("the experts of a layer were not finished: its shared experts did not run")
    finally:
        _deferred = before


def finish_deferred() -> None:
    """Completes the call that `deferring` split. Does nothing if there is none."""
    if _deferred:
        _deferred.pop()()


@cache
def _breaks() -> _Breaks:
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph

    return _Breaks(
        eager_on_graph(_at_once, capture_stub=_reserve),
        eager_on_graph(_begin, capture_stub=lambda *args: None),
        eager_on_graph(_finish, capture_stub=lambda begun, *args: _reserve(*args)),
    )


def _at_once(compute: Compute, adapters: Adapters, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
    if replays.is_preparing():
        out.zero_()
        return
    rows = _num_tokens(x)
    with _staged_in_its_set(x):
        _compute_rows(rows, compute, adapters, x, ids, weights, out)
    _clear_padding(out, rows)


def _begin(begun: Begun, x: Tensor) -> None:
    if not replays.is_preparing():
        begun.routed = device.recorded(device=x.device)


def _finish(
    begun: Begun, compute: Compute, adapters: Adapters, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor
) -> None:
    if replays.is_preparing():
        out.zero_()
        return
    routed, begun.routed = begun.routed, None
    if routed is None:
        raise ConflictError("experts were finished that had not begun")
    rows, model_stream, stream = _num_tokens(x), device.current_stream(x.device), _stream(x.device)
    stream.wait_event(routed)
    try:
        with device.on(stream), _staged_in_its_set(x):
            _compute_rows(rows, compute, adapters, x, ids, weights, out)
            _clear_padding(out, rows)
    finally:  # also after an error: the batch's tensors may be used again on the model's stream
        model_stream.wait_event(device.recorded(stream))


def _compute_rows(
    rows: int, compute: Compute, adapters: Adapters, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor
) -> None:
    if rows:
        slots, token_slots = adapters(rows)
        compute(x[:rows], ids[:rows], weights[:rows], slots, token_slots, out[:rows])


def _clear_padding(out: Tensor, rows: int) -> None:
    if rows < out.shape[0]:
        out[rows:].zero_()


def _num_tokens(x: Tensor) -> int:
    replay = replays.current()
    return x.shape[0] if replay is None else min(replay.num_tokens, x.shape[0])


def _reserve(compute: Compute, adapters: Adapters, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
    """The stub while a graph is captured: allocates the pinned buffers of its size, computes and copies nothing."""
    if not replays.is_prefill():
        token_slots = torch.empty(x.shape[0], dtype=torch.int32, device="meta")
        wanted = {"x": x, "ids": ids, "weights": weights, "token_slots": token_slots, "out": out}
        _sets.setdefault(x.shape[0], staging.StagingBuffers()).reserve(wanted)


def _staged_in_its_set(x: Tensor) -> AbstractContextManager[None]:
    buffers = None if replays.current() is None or replays.is_prefill() else _sets.get(x.shape[0])
    return nullcontext() if buffers is None else staging.staged_in(buffers)


def _stream(where: torch.device) -> torch.Stream:
    if where not in _streams:
        _streams[where] = device.new_stream(where)
    return _streams[where]


def no_adapters(num_tokens: int) -> tuple[Sequence[Any], Tensor | None]:
    """The `Adapters` of a layer that LoRA does not wrap."""
    return (), None
