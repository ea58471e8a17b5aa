"""One training call as a sequence of slices: embedding, each layer forward, the loss, each layer backward.

Either forward keeps only the input of each layer (activation checkpointing, Chen et al. 2016), and backward recomputes
a layer and goes through it at once, last to first. Or it retains what autograd needs of each layer, its experts'
activations with it, and backward frees it layer by layer. Both give the same gradients. Microbatches come one after
the other, so that only one has anything kept. Between any two slices the engine may serve.

The call's gradient lives in the generator until the end: a call that dies half-way leaves none. Dropout draws from a
seed per (session, call, microbatch, layer), the same when a layer is recomputed, and leaves the process's generators
alone.

Gradients are off between slices and on where one needs them. Must not run in inference mode: `service.py` leaves it.

Shapes: B sequences, S longest of them, H hidden, N tokens of the call, M real tokens of a microbatch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch

from kt_runtime.resident.scheduler import Slice
from kt_runtime.resident.training.call import Call, CallResult
from kt_runtime.resident.training.loss_slices import loss_of
from kt_runtime.resident.twin.batches import Microbatch
from kt_runtime.resident.twin.model import Positions


def training_call(call: Call, microbatches: list[Microbatch], num_tokens: int) -> Generator[Slice, None, CallResult]:
    """Runs the call. Raises NumericsError when the loss is not finite; nothing outside has changed then.

    Yields before every slice what it is. Another session may go first where a microbatch begins.
    """
    result = CallResult(0.0, torch.zeros(num_tokens), {})
    for index, microbatch in enumerate(microbatches):
        yield from _microbatch(call, microbatch, index, result)
    return result


@dataclass
class _Kept:
    """What forward keeps of a layer: its input as a leaf of autograd's, and its output where the graph is retained."""

    leaf: torch.Tensor
    output: torch.Tensor | None


def _microbatch(call: Call, microbatch: Microbatch, index: int, result: CallResult) -> Generator[Slice, None, None]:
    twin = call.twin
    yield Slice("embedding", microbatch.tokens.numel(), may_switch=True)
    with _slice(call, microbatch, index, -1, grad=False):
        hidden = twin.embed(microbatch.tokens)
        positions = twin.positions(hidden, microbatch.positions)
    kept: list[_Kept] = []
    lowest = call.lora.lowest_layer(call.adapter) if call.backward and call.adapter else twin.num_layers
    for layer in range(twin.num_layers):
        retain = call.retain and layer >= lowest
        yield _layer_slice(call, microbatch, "forward", layer, range(layer, twin.num_layers))
        with _slice(call, microbatch, index, layer, grad=retain):
            leaf = hidden.detach().requires_grad_(layer > lowest)
            output = twin.run_layer(layer, leaf, positions, microbatch.branches)
            if layer >= lowest:
                kept.append(_Kept(leaf, output if retain else None))
            hidden = output.detach()
            del leaf, output
    result.num_computed += microbatch.num_computed
    by_hidden = yield from loss_of(call, microbatch, hidden, result)
    if by_hidden is None:
        return
    del hidden
    for layer in range(twin.num_layers - 1, lowest - 1, -1):
        yield _layer_slice(call, microbatch, "backward", layer, range(layer, lowest - 1, -1))
        with _slice(call, microbatch, index, layer, grad=True):
            by_hidden = _layer_backward(call, microbatch, layer, kept.pop(), positions, by_hidden, result.gradient)


def _layer_slice(call: Call, microbatch: Microbatch, direction: str, layer: int, coming: range) -> Slice:
    """`coming`: the layers that follow each other in this direction, `layer` first."""
    has_experts = call.twin.experts_of(layer) is not None
    alike = 0
    while alike < len(coming) and (call.twin.experts_of(coming[alike]) is not None) == has_experts:
        alike += 1
    kind = f"{direction} {'experts' if has_experts else 'dense'}{' retained' if call.retain else ''}"
    return Slice(kind, microbatch.tokens.numel(), alike)


def _layer_backward(
    call: Call,
    microbatch: Microbatch,
    layer: int,
    kept: _Kept,
    positions: Positions,
    by_output: torch.Tensor,
    gradient: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Adds a layer's parameters' gradients to `gradient`, returns the gradient by its input.

    Where the input needs none, nothing below has a parameter, and what comes back is `by_output`.
    """
    assert call.adapter is not None
    parameters = call.lora.parameters(call.adapter, layer)
    output = kept.output
    if output is None:
        with call.twin.recomputing(layer):
            output = call.twin.run_layer(layer, kept.leaf, positions, microbatch.branches)
    needs_input = kept.leaf.requires_grad
    wanted = list(parameters.values()) + ([kept.leaf] if needs_input else [])
    found = torch.autograd.grad(output, wanted, by_output, allow_unused=True)
    for name, value in zip(parameters, found, strict=False):
        if value is not None:
            if name in gradient:
                gradient[name] += value
            else:
                gradient[name] = value.detach()
    return found[-1] if needs_input else by_output


@contextlib.contextmanager
def _slice(call: Call, microbatch: Microbatch, index: int, layer: int, *, grad: bool) -> Iterator[None]:
    """The surroundings of one slice: gradients on or off, the session's adapter in its layer, dropout's seed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad))
        if 0 <= layer < call.twin.num_layers:
            stack.enter_context(call.twin.padding(microbatch.padding))
            call.lora.select(layer, call.adapter, dropout=call.backward)
            if call.backward and call.adapter is not None and call.lora.has_dropout(call.adapter):
                stack.enter_context(_own_randomness(call.twin.device, call.seed, index, layer))
        yield


@contextlib.contextmanager
def _own_randomness(device: torch.device, *seeds: int) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        digest = hashlib.sha256(repr(seeds).encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
