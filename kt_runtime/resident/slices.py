"""One training call as a sequence of slices: embedding, each layer forward, the loss, each layer backward.

Forward keeps only the input of each layer (activation checkpointing, Chen et al. 2016); backward recomputes a layer and
goes through it at once, last to first. Microbatches come one after the other, so that only one has kept inputs. Between
any two slices the engine may serve.

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

from kt_runtime.errors import NumericsError
from kt_runtime.resident.batches import Microbatch
from kt_runtime.resident.lora import LoraModules
from kt_runtime.resident.losses import (
    LossSlope,
    hidden_gradient,
    target_logprobs,
    tokens_per_chunk,
    weighted_loss,
)
from kt_runtime.resident.twin import Twin


@dataclass(frozen=True)
class Call:
    """What stays the same over one call. `adapter`: the key in `LoraModules`, None for the base alone.

    `backward` False: log-probabilities only, without dropout. `seed`: of this call's dropout.
    """

    twin: Twin
    lora: LoraModules
    adapter: str | None
    slope: LossSlope
    backward: bool
    seed: int


@dataclass
class CallResult:
    """`logprobs` [N], float32, on the CPU. `gradient`: by parameter name, empty without backward."""

    loss: float
    logprobs: torch.Tensor
    gradient: dict[str, torch.Tensor]


def training_call(call: Call, microbatches: list[Microbatch], num_tokens: int) -> Generator[bool, None, CallResult]:
    """Runs the call. Raises NumericsError when the loss is not finite; nothing outside has changed then.

    Yields after every slice: True at the end of a microbatch, otherwise False.
    """
    result = CallResult(0.0, torch.zeros(num_tokens), {})
    for index, microbatch in enumerate(microbatches):
        for _ in _microbatch(call, microbatch, index, result):
            yield False
        yield True
    return result


def _microbatch(call: Call, microbatch: Microbatch, index: int, result: CallResult) -> Iterator[None]:
    twin = call.twin
    with _slice(call, microbatch, index, -1, grad=False):
        hidden = twin.embed(microbatch.tokens)
        positions = twin.positions(hidden)
    yield
    inputs: list[torch.Tensor] = []
    lowest = call.lora.lowest_layer(call.adapter) if call.backward and call.adapter else twin.num_layers
    for layer in range(twin.num_layers):
        with _slice(call, microbatch, index, layer, grad=False):
            inputs.append(hidden if layer >= lowest else hidden.new_empty(0))
            hidden = twin.run_layer(layer, hidden, positions)
        yield
    by_hidden = yield from _loss(call, microbatch, index, hidden, result)
    if by_hidden is None:
        return
    for layer in range(twin.num_layers - 1, lowest - 1, -1):
        with _slice(call, microbatch, index, layer, grad=True):
            by_hidden = _layer_backward(
                call, layer, inputs.pop(), positions, by_hidden, needs_input=layer > lowest, gradient=result.gradient
            )
        yield


def _loss(
    call: Call, microbatch: Microbatch, index: int, hidden: torch.Tensor, result: CallResult
) -> Generator[None, None, torch.Tensor | None]:
    """Loss of the real tokens, chunk by chunk; the gradient by the last layer's output [B, S, H], None without."""
    twin = call.twin
    size = tokens_per_chunk(twin.vocabulary)
    with _slice(call, microbatch, index, twin.num_layers, grad=False):
        normed = twin.final_norm(hidden.flatten(0, 1)[microbatch.real])
    by_normed, loss = torch.zeros_like(normed), 0.0
    for start in range(0, len(normed), size):
        chunk = slice(start, start + size)
        targets, weights = microbatch.targets[chunk], microbatch.weights[chunk]
        with _slice(call, microbatch, index, twin.num_layers, grad=False):
            logprobs, everything = target_logprobs(normed[chunk], twin.head, targets)
            loss += weighted_loss(logprobs, weights)
            result.logprobs[microbatch.where[chunk]] = logprobs.cpu()
            if call.backward:
                slopes = call.slope(logprobs, weights)
                by_normed[chunk] = hidden_gradient(everything, targets, slopes, twin.head)
        yield
    if not torch.isfinite(torch.tensor(loss)):
        raise NumericsError(f"the loss is {loss}; nothing was added to the gradient")
    result.loss += loss
    if not call.backward:
        return None
    with _slice(call, microbatch, index, twin.num_layers, grad=True):
        return _norm_backward(twin, hidden, microbatch, by_normed)


def _norm_backward(twin: Twin, hidden: torch.Tensor, microbatch: Microbatch, by_normed: torch.Tensor) -> torch.Tensor:
    leaf = hidden.detach().requires_grad_()
    normed = twin.final_norm(leaf.flatten(0, 1)[microbatch.real])
    return torch.autograd.grad(normed, leaf, by_normed)[0]


def _layer_backward(
    call: Call,
    layer: int,
    kept: torch.Tensor,
    positions: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    by_output: torch.Tensor,
    *,
    needs_input: bool,
    gradient: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Recomputes a layer, adds its parameters' gradients to `gradient`, returns the gradient by its input.

    Without `needs_input` nothing below has a parameter, and what comes back is `by_output`.
    """
    assert call.adapter is not None
    parameters = call.lora.parameters(call.adapter, layer)
    leaf = kept.detach().requires_grad_(needs_input)
    output = call.twin.run_layer(layer, leaf, positions)
    wanted = list(parameters.values()) + ([leaf] if needs_input else [])
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
