"""One training call as a sequence of slices: embedding, each layer forward, the loss, each layer backward.

Forward has two modes with equal gradients. "recompute" keeps only each layer's input (activation checkpointing, Chen et
al. 2016); backward recomputes and differentiates one layer at a time, last to first. "retain" keeps all that autograd
needs of each layer, including its experts' activations; backward frees it layer by layer. Microbatches run one after
the other, so only one microbatch holds activations. Between any two slices the engine may serve. A layer whose slice
would take too long is cut (`twin.parts`), with the same bits; what forward has retained of it is given up then.

The call's gradient lives in the generator until the end: a failed call leaves no gradient. Dropout uses one seed per
(session, call, microbatch, layer), so a recomputed layer drops the same elements. The process's random generators stay
unchanged.

Autograd is off between slices and on in slices that need it. Must not run in inference mode: `resident/server.py`
leaves it.

Shapes: B sequences, S longest of them, H hidden, N tokens of the call, M real tokens of a microbatch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

import torch

from kt_runtime import device
from kt_runtime.resident.scheduler import Slice
from kt_runtime.resident.training.call import Call, CallResult
from kt_runtime.resident.training.loss_slices import loss_of
from kt_runtime.resident.training.replay import MicrobatchRoutes
from kt_runtime.resident.twin.attention import Positions
from kt_runtime.resident.twin.batches import Microbatch
from kt_runtime.resident.twin.model import Twin
from kt_runtime.resident.twin.parts import LayerParts, Tokens, attention_kind
from kt_runtime.resident.twin.split import SplitParts


def training_call(
    call: Call, microbatches: list[Microbatch], num_tokens: int
) -> Generator[Slice, int | None, CallResult]:
    """Runs the call. Raises NumericsError if the loss is not finite, without side effects.

    Yields each slice's description before it runs. Another session may run before each microbatch.
    """
    result = CallResult(0.0, torch.zeros(num_tokens), {})
    if call.routes is not None:
        result.metrics |= call.routes.metrics()
    for index, microbatch in enumerate(microbatches):
        yield from _microbatch(call, microbatch, index, result)
    return result


@dataclass
class _Kept:
    """What forward keeps of a layer: its input as an autograd leaf, and its output if the graph is retained. Of several
    ranks each keeps some columns of an input whose graph is not retained (`split`)."""

    leaf: torch.Tensor
    output: torch.Tensor | None
    split: SplitParts | None = None

    @classmethod
    def of(cls, twin: Twin, leaf: torch.Tensor, output: torch.Tensor | None) -> _Kept:
        if twin.split is None or output is not None:
            return cls(leaf, output)
        return cls(twin.split.kept(leaf.detach()).requires_grad_(leaf.requires_grad), None, twin.split)

    def whole(self) -> _Kept:
        """The same with the whole input: ranks send each other their columns."""
        if self.split is None:
            return self
        return _Kept(self.split.whole(self.leaf.detach()).requires_grad_(self.leaf.requires_grad), self.output)


def _microbatch(
    call: Call, microbatch: Microbatch, index: int, result: CallResult
) -> Generator[Slice, int | None, None]:
    twin = call.twin
    yield Slice("embedding", microbatch.tokens.numel(), may_switch=True)
    routes = None if call.routes is None else MicrobatchRoutes(call.routes, microbatch, twin.routed_layers)
    with _slice(call, microbatch, index, -1, grad=False):
        hidden = twin.embed(microbatch.tokens)
        positions = twin.positions(hidden, microbatch.positions)
    kept: list[_Kept] = []
    lowest = call.lora.lowest_layer(call.adapter) if call.backward and call.adapter else twin.num_layers
    for layer in range(twin.num_layers):
        retain = call.retain and layer >= lowest
        granted = yield _layer_slice(call, microbatch, "forward", layer, range(layer, twin.num_layers))
        leaf = hidden.detach().requires_grad_(layer > lowest)
        if granted is None:
            with _slice(call, microbatch, index, layer, grad=retain, routes=routes):
                output = twin.run_layer(layer, leaf, positions, microbatch.branches)
        else:
            retain = False
            parts = _parts(call, microbatch, index, layer, positions, routes)
            output = yield from parts.forward(hidden, granted)
        if layer >= lowest:
            kept.append(_Kept.of(twin, leaf, output if retain else None))
        hidden = output.detach()
        del leaf, output
    result.num_computed += microbatch.num_computed
    if routes is not None:
        result.metrics["routes/moved"] += routes.num_moved
    by_hidden = yield from loss_of(call, microbatch, hidden, result)
    if by_hidden is None:
        return
    _release_columns(twin)
    del hidden
    for layer in range(twin.num_layers - 1, lowest - 1, -1):
        granted = yield _layer_slice(call, microbatch, "backward", layer, range(layer, lowest - 1, -1))
        of_layer = kept.pop().whole()
        if granted is None:
            with _slice(call, microbatch, index, layer, grad=True, routes=routes):
                by_hidden = _layer_backward(call, microbatch, layer, of_layer, positions, by_hidden, result.gradient)
        else:
            parameters = call.lora.parameters(call.adapter, layer) if call.adapter is not None else {}
            parts = _parts(call, microbatch, index, layer, positions, routes)
            leaf, of_layer = of_layer.leaf, _Kept(of_layer.leaf, None)
            by_hidden, found = yield from parts.backward(leaf, by_hidden, list(parameters.values()), granted)
            _add_gradients(result.gradient, zip(parameters, found, strict=True))
        _release_columns(twin)


def _release_columns(twin: Twin) -> None:
    """Frees the columns of a layer, or of the head, whose backward pass has ended. After a failed call the next one
    does."""
    if twin.split is not None:
        twin.split.release()


def _layer_slice(call: Call, microbatch: Microbatch, direction: str, layer: int, coming: range) -> Slice:
    """`coming`: the remaining layers in this direction, `layer` first."""
    has_experts = call.twin.experts_of(layer) is not None
    alike = 0
    while alike < len(coming) and (call.twin.experts_of(coming[alike]) is not None) == has_experts:
        alike += 1
    kind = f"{direction} {'experts' if has_experts else 'dense'}{' retained' if call.retain else ''}"
    tokens, row = microbatch.tokens.numel(), microbatch.tokens.shape[1]
    if not _may_be_cut(call):
        return Slice(kind, tokens, alike)
    return Slice(kind, tokens, alike, least=row, part=attention_kind(direction))


def _may_be_cut(call: Call) -> bool:
    drops_out = call.backward and call.adapter is not None and call.lora.has_dropout(call.adapter)
    return call.twin.computes_tokens_alone and not drops_out


def _parts(
    call: Call,
    microbatch: Microbatch,
    index: int,
    layer: int,
    positions: Positions,
    routes: MicrobatchRoutes | None,
) -> LayerParts:
    def context(tokens: Tokens, grad: bool) -> contextlib.AbstractContextManager[None]:
        return _slice(call, microbatch, index, layer, grad=grad, routes=routes, tokens=tokens)

    return LayerParts(call.twin, layer, positions, microbatch.branches, context)


def _layer_backward(
    call: Call,
    microbatch: Microbatch,
    layer: int,
    kept: _Kept,
    positions: Positions,
    by_output: torch.Tensor,
    gradient: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Adds the gradients of a layer's parameters to `gradient`, and returns the gradient of the layer's input.

    If the input needs no gradient (no layer below has a parameter), returns `by_output`.
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
    _add_gradients(gradient, zip(parameters, found, strict=False))
    return found[-1] if needs_input else by_output


def _add_gradients(gradient: dict[str, torch.Tensor], found: Iterable[tuple[str, torch.Tensor | None]]) -> None:
    for name, value in found:
        if value is None:
            continue
        if name in gradient:
            gradient[name] += value
        else:
            gradient[name] = value.detach()


@contextlib.contextmanager
def _slice(
    call: Call,
    microbatch: Microbatch,
    index: int,
    layer: int,
    *,
    grad: bool,
    routes: MicrobatchRoutes | None = None,
    tokens: Tokens | None = None,
) -> Iterator[None]:
    """The context of one slice: autograd on or off, the session's adapter selected in its layer, the dropout seed, and
    the experts that the layer's router is given. `tokens`: those of the microbatch that the slice computes; None: all.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad))
        if 0 <= layer < call.twin.num_layers:
            padding, of_layer = microbatch.padding, None if routes is None else routes.of_layer(layer)
            if tokens is not None:
                first, count = tokens
                padding = None if padding is None else padding[first : first + count]
                of_layer = None if of_layer is None else of_layer.part(first, count)
            stack.enter_context(call.twin.padding(padding))
            stack.enter_context(call.twin.routing(layer, of_layer))
            call.lora.select(layer, call.adapter, dropout=call.backward)
            if call.backward and call.adapter is not None and call.lora.has_dropout(call.adapter):
                stack.enter_context(_own_randomness(call.twin.device, call.seed, index, layer))
        yield
    if call.twin.split is not None:
        call.twin.split.freed.give_back()


@contextlib.contextmanager
def _own_randomness(where: torch.device, *seeds: int) -> Iterator[None]:
    with device.forked_randomness(where):
        digest = hashlib.sha256(repr(seeds).encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
