"""A layer's forward or backward pass in parts, where it would take too long at once. The bits do not depend on the cut.

Attention is computed for some rows at a time, the rest of the layer for some tokens at a time. On a CPU a token's
result, and its gradient, depend on this token alone (with attention: on its row). The gradients of LoRA's masters are
sums over tokens; `CollectedGradients` keeps their order. Dropout draws for all tokens of a microbatch at once, so a
layer with dropout is not cut.

A backward pass in parts recomputes the layer, as activation checkpointing does:

1. attention forward, for some rows, with its graph kept;
2. the rest forward and backward, for some tokens: the gradient of attention's result;
3. attention backward, for some rows, in the parts of step 1.

Attention can't be cut within a row, so a part has at least one row.

Shapes: B rows, S tokens of the longest, T = B S, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from kt_runtime.ops.matmul import collected_gradients
from kt_runtime.ops.rotary import Rotary
from kt_runtime.resident.scheduler import Slice
from kt_runtime.resident.twin.attention import Branches, Positions
from kt_runtime.resident.twin.model import Twin

LEAST_TOKENS = 32
"""Fewest tokens of a part without attention. With fewer, each expert's weights would be read for one or two tokens."""

Tokens = tuple[int, int]
"""First token and number of tokens among the T of a microbatch."""

Context = Callable[[Tokens, bool], AbstractContextManager[None]]
"""`context(tokens, grad)`: in it the layer's adapter is selected, and its experts and router know these tokens only."""

Sized = Generator[Slice, int | None, tuple[int, int]]


@dataclass(frozen=True)
class LayerParts:
    """One layer of a microbatch. `positions`, `branches`: those of all rows."""

    twin: Twin
    layer: int
    positions: Positions
    branches: Branches
    context: Context

    def forward(self, hidden: torch.Tensor, granted: int) -> Generator[Slice, int | None, torch.Tensor]:
        """The layer's output [B, S, H] without a graph. `granted`: tokens of the first part."""
        attended = torch.empty_like(hidden)
        first = 0
        while first < len(hidden):
            rows = self._rows(hidden, first, granted)
            with self.context(_tokens_of(hidden, rows), False):
                attended[rows] = self._attention(hidden, rows)
            first = rows.stop
            granted = yield from self._next(hidden, first, "forward")
        out = torch.empty_like(attended)
        tokens, of_tokens = attended.view(1, -1, attended.shape[-1]), out.view(1, -1, out.shape[-1])
        at = 0
        while at < tokens.shape[1]:
            count = min(granted, tokens.shape[1] - at)
            with self.context((at, count), False):
                of_tokens[:, at : at + count] = self.twin.feed_forward(self.layer, tokens[:, at : at + count])
            at += count
            if at < tokens.shape[1]:
                granted = yield from self._granted_tokens("forward", tokens.shape[1] - at)
        return out

    def backward(
        self, hidden: torch.Tensor, by_output: torch.Tensor, parameters: Sequence[torch.Tensor], granted: int
    ) -> Generator[Slice, int | None, tuple[torch.Tensor, list[torch.Tensor | None]]]:
        """The gradients of the layer's input `hidden` [B, S, H] and of `parameters`, None for one without influence."""
        of_attention = collected_gradients()
        kept: list[tuple[slice, torch.Tensor, torch.Tensor]] = []
        first = 0
        while first < len(hidden):
            rows = self._rows(hidden, first, granted)
            with self.context(_tokens_of(hidden, rows), True), of_attention.part():
                leaf = hidden[rows].detach().requires_grad_()
                kept.append((rows, leaf, self._attention(leaf, rows, of_leaf=True)))
            first = rows.stop
            granted = yield from self._next(hidden, first, "backward")
        attended = torch.cat([output.detach() for _, _, output in kept])
        by_attended, found = yield from self._feed_forward_backward(attended, by_output, parameters, granted)
        by_input = torch.empty_like(hidden)
        for rows, leaf, output in kept:
            yield Slice("backward attention", leaf.shape[0] * leaf.shape[1])
            with self.context(_tokens_of(hidden, rows), True):
                (by_input[rows],) = torch.autograd.grad(output, [leaf], by_attended[rows])
        kept.clear()
        yield Slice("backward masters", hidden.shape[0] * hidden.shape[1])
        return by_input, _either(found, of_attention.gradients(parameters))

    def _feed_forward_backward(
        self, attended: torch.Tensor, by_output: torch.Tensor, parameters: Sequence[torch.Tensor], granted: int
    ) -> Generator[Slice, int | None, tuple[torch.Tensor, list[torch.Tensor | None]]]:
        collected = collected_gradients()
        by_attended = torch.empty_like(attended)
        flat, by_out, by_flat = (x.reshape(1, -1, x.shape[-1]) for x in (attended, by_output, by_attended))
        at = 0
        while at < flat.shape[1]:
            count = min(granted, flat.shape[1] - at)
            part = slice(at, at + count)
            with self.context((at, count), True), self.twin.recomputing(self.layer):
                leaf = flat[:, part].detach().requires_grad_()
                with collected.part():
                    output = self.twin.feed_forward(self.layer, leaf)
                (by_flat[:, part],) = torch.autograd.grad(output, [leaf], by_out[:, part])
            at += count
            if at < flat.shape[1]:
                granted = yield from self._granted_tokens("backward", flat.shape[1] - at)
        return by_attended, collected.gradients(parameters)

    def _attention(self, hidden: torch.Tensor, rows: slice, *, of_leaf: bool = False) -> torch.Tensor:
        """Attention of some rows. `hidden`: all rows, or these alone (`of_leaf`)."""
        positions = self.positions
        assert isinstance(positions, Rotary)
        places = positions.places[rows] if len(positions.places) > 1 else positions.places
        positions = replace(positions, places=places, first_row=rows.start)
        branches = None if self.branches is None else self.branches[rows]
        return self.twin.attention(self.layer, hidden if of_leaf else hidden[rows], positions, branches)

    def _rows(self, hidden: torch.Tensor, first: int, granted: int) -> slice:
        return slice(first, min(len(hidden), first + max(1, granted // hidden.shape[1])))

    def _next(self, hidden: torch.Tensor, first: int, direction: str) -> Generator[Slice, int | None, int]:
        """Tokens of the next part: rows of attention while there are any, then tokens of the rest of the layer."""
        left = (len(hidden) - first) * hidden.shape[1]
        if not left:
            return (yield from self._granted_tokens(direction, hidden.shape[0] * hidden.shape[1]))
        kind = attention_kind(direction)
        granted = yield Slice(kind, left, least=hidden.shape[1], part=kind)
        return left if granted is None else granted

    def _granted_tokens(self, direction: str, left: int) -> Generator[Slice, int | None, int]:
        kind = f"{direction} {'experts' if self.twin.experts_of(self.layer) is not None else 'dense'} after attention"
        granted = yield Slice(kind, left, least=min(left, LEAST_TOKENS), part=kind)
        return left if granted is None else granted


def attention_kind(direction: str) -> str:
    return "forward attention" if direction == "forward" else "attention again"


def _tokens_of(hidden: torch.Tensor, rows: slice) -> Tokens:
    return rows.start * hidden.shape[1], (rows.stop - rows.start) * hidden.shape[1]


def _either(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Gradients of parameters each of which belongs to one of two modules."""
    return [b if a is None else a for a, b in zip(one, other, strict=True)]
