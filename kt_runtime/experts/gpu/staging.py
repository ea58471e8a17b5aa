"""Stages tensors of a device through pinned host buffers: device to host, compute on the CPU, host to device.

Inputs are copied on the current stream; the call waits for the copies' event, so the caller's stream order holds. The
result is copied back asynchronously; the pinned buffer is not overwritten before this copy has finished. Buffers are
per thread and reused; a caller may bring its own (`staged_in`). Host copies of LoRA tensors are cached, and renewed
when a tensor changes (its autograd version counts in-place writes).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from kt_runtime import device
from kt_runtime.errors import InvalidValueError
from kt_runtime.experts.gpu.call import ExpertCall
from kt_runtime.experts.values import ExpertGradients, LoraSlot, Retained


class HostLayer(Protocol):
    """An `ExpertLayer`, called with tensors in CPU memory."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def forward_retaining(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]: ...

    def backward(self, *args: Any, **kwargs: Any) -> ExpertGradients: ...


class StagingBuffers:
    """Pinned buffers by name: `x`, `ids`, `weights`, `token_slots`, `out`, ... For one thread at a time."""

    def __init__(self) -> None:
        self._named: dict[str, device.PinnedBuffer] = {}

    def get(self, name: str) -> device.PinnedBuffer:
        return self._named.setdefault(name, device.PinnedBuffer())

    def reserve(self, wanted: Mapping[str, Tensor]) -> None:
        """Allocates for tensors of these shapes and dtypes: calls with no more rows allocate nothing."""
        for name, tensor in wanted.items():
            self.get(name).like(tensor)


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.current = StagingBuffers()
        # id of the device's tensor -> (the tensor, its version when copied, the host copy)
        self.adapters: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def get(self, name: str) -> device.PinnedBuffer:
        return self.current.get(name)


_buffers = _Buffers()


@contextmanager
def staged_in(buffers: StagingBuffers) -> Iterator[None]:
    """Calls of this thread inside use `buffers` instead of the thread's own."""
    before, _buffers.current = _buffers.current, buffers
    try:
        yield
    finally:
        _buffers.current = before


def forward(layer: HostLayer, call: ExpertCall, out: Tensor | None, *, retain: bool) -> tuple[Tensor, Retained | None]:
    """ExpertLayer.forward for a device's x; the result is on x's device, ready in the order of the current stream."""
    with device.guard(call.x.device):
        inputs = _to_host(_tensors(call), call.x.device)
        buffer = _buffers.get("out")
        host_out = buffer.like(inputs["x"])
        run = layer.forward_retaining if retain else layer.forward
        done = run(
            inputs["x"],
            inputs["ids"],
            inputs["weights"],
            slots=[_host_slot(slot) for slot in call.slots],
            token_slots=inputs.get("token_slots"),
            out=host_out,
        )
        if out is None:
            out = torch.empty_like(call.x, memory_format=torch.contiguous_format, requires_grad=False)
        _to_device(host_out, out, buffer)
        return out, done[1] if isinstance(done, tuple) else None


def backward(
    layer: HostLayer,
    grad_out: Tensor,
    call: ExpertCall,
    into: Sequence[LoraSlot | None] | None,
    retained: Retained | None,
) -> ExpertGradients:
    """ExpertLayer.backward for a device's x. Gradients of a slot are on the device of that slot's tensors."""
    with device.guard(call.x.device):
        inputs = _to_host({"grad_out": grad_out, **_tensors(call)}, call.x.device)
        host = layer.backward(
            inputs["grad_out"],
            inputs["x"],
            inputs["ids"],
            inputs["weights"],
            slots=[_host_slot(slot) for slot in call.slots],
            token_slots=inputs.get("token_slots"),
            retained=retained,
        )
        grads = [_like_slot(g, s) for g, s in zip(host.slots, call.slots, strict=True)]
        if into is not None:
            grads = [_added(target, g) for target, g in zip(into, grads, strict=True)]
        return ExpertGradients(host.x.to(call.x.device), host.weights.to(call.x.device), grads)


def _tensors(call: ExpertCall) -> dict[str, Tensor | None]:
    return {"x": call.x, "ids": call.ids, "weights": call.weights, "token_slots": call.token_slots}


def _to_host(tensors: dict[str, Tensor | None], where: torch.device) -> dict[str, Tensor]:
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.device != where:
            found = tensor.device if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidValueError(f"{name} is on {found}, x on {where}: they must be on one device")
        copies[name] = _buffers.get(name).like(tensor)
        copies[name].copy_(tensor.detach(), non_blocking=True)
    device.recorded(device=where).synchronize()
    return copies


def _to_device(host: Tensor, device_tensor: Tensor, buffer: device.PinnedBuffer) -> None:
    device_tensor.copy_(host, non_blocking=True)
    buffer.busy_until(device.recorded(device=device_tensor.device))


def _host_slot(slot: LoraSlot | None) -> LoraSlot | None:
    if slot is None:
        return None
    return slot.with_tensors([None if t is None else _host_adapter(t) for t in slot.tensors()])


def _host_adapter(tensor: Tensor) -> Tensor:
    if device.is_host(tensor):
        return tensor
    if tensor.is_inference():  # has no version to compare
        return tensor.detach().to("cpu")
    known = _buffers.adapters.get(id(tensor))
    if known is not None and known[0]() is tensor and known[1] == tensor._version:
        return known[2]
    copy = tensor.detach().to("cpu").contiguous()
    cache, key = _buffers.adapters, id(tensor)
    cache[key] = (weakref.ref(tensor, lambda _: cache.pop(key, None)), tensor._version, copy)
    return copy


def _like_slot(grads: LoraSlot | None, slot: LoraSlot | None) -> LoraSlot | None:
    if grads is None or slot is None:
        return None
    pairs = zip(grads.tensors(), slot.tensors(), strict=True)
    return grads.with_tensors([None if g is None or t is None else g.to(t.device) for g, t in pairs])


def _added(target: LoraSlot | None, grads: LoraSlot | None) -> LoraSlot | None:
    if target is None or grads is None:
        return grads
    for total, grad in zip(target.tensors(), grads.tensors(), strict=True):
        if total is not None and grad is not None:
            total.add_(grad)
    return target
