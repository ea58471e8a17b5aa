"""Gradients of LoRA masters over tokens that are computed in parts, with the bits of one computation over all of them.

The gradient of a master is a sum over tokens. Sums of float32 depend on their order, so partial sums are not added up:

- A dense master's gradient is one product over all tokens. The backward of a part only keeps the product's operands
  (`keep`), and `gradients` computes the product over the operands of all parts together.
- The native backward of routed experts adds a pair's products one after the other to its result. It continues with the
  sums of the part before (`slot`).

Each part must run the same operations in the same order: a master is known by the number of its operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kt_runtime.experts.values import LoraSlot

Product = Callable[[Tensor, Tensor, float], Tensor]
"""alpha * a^T b in float32: a [..., M, K], b [..., M, N], alpha -> [..., K, N]."""


class Place(NamedTuple):
    """Place of an operation: the number of its part, and its own number within that part."""

    collected: CollectedGradients
    part: int
    number: int


class CollectedGradients:
    """Gradients of one module's masters over all of its parts. `product` computes a dense master's gradient."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self._masters: list[tuple[Tensor | None, ...]] = []
        self._operands: dict[int, dict[int, tuple[Tensor, Tensor, float]]] = {}
        self._slots: dict[int, tuple[int, LoraSlot]] = {}
        self._num_parts = self._next = 0

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """The forward operations of the next part run in this context."""
        global _current
        assert _current is None, "the parts of one module at a time"
        self._next = 0
        _current = self
        try:
            yield
        finally:
            _current = None
            self._num_parts += 1

    def place(self, *masters: Tensor | None) -> Place:
        """The place of the operation that begins. `masters`: the operation's."""
        number, self._next = self._next, self._next + 1
        if number == len(self._masters):
            self._masters.append(masters)
        return Place(self, self._num_parts, number)

    def keep(self, at: Place, x: Tensor, by_out: Tensor, alpha: float) -> None:
        """The dense operation's master gets alpha * x^T by_out: x [..., M, K], by_out [..., M, N], M tokens."""
        self._operands.setdefault(at.number, {})[at.part] = (x, by_out, alpha)

    def slot(self, at: Place, of: LoraSlot) -> LoraSlot:
        """The sums of the experts' gradients so far; parts must go backward in the order in which they went forward."""
        last, sums = self._slots.get(at.number) or (-1, of.zeros())
        assert at.part > last, "a part's experts go backward after those of the parts before"
        self._slots[at.number] = at.part, sums
        return sums

    def gradients(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the `parameters` from which the masters were made; None for one that no operation used."""
        found: list[tuple[Tensor, Tensor]] = []
        for number, of_parts in self._operands.items():
            (master,) = self._masters[number]
            assert master is not None
            xs, by_outs, alphas = zip(*(of_parts[part] for part in sorted(of_parts)), strict=True)
            total = self._product(torch.cat(xs, dim=-2), torch.cat(by_outs, dim=-2), alphas[0])
            found.append((master, total.to(master.dtype)))
        for number, (_, sums) in self._slots.items():
            for each, of_each in zip(self._masters[number], sums.tensors(), strict=True):
                if each is not None and each.requires_grad and of_each is not None:
                    found.append((each, of_each.to(each.dtype)))
        if not found or not parameters:
            return [None] * len(parameters)
        masters, totals = zip(*found, strict=True)
        return list(torch.autograd.grad(masters, parameters, totals, allow_unused=True))


_current: CollectedGradients | None = None  # training runs on one thread


def place_of(*masters: Tensor | None) -> Place | None:
    """The place of an operation with these masters, if the gradients of a module's parts are collected."""
    wanted = (
        _current is not None and torch.is_grad_enabled() and any(m is not None and m.requires_grad for m in masters)
    )
    return _current.place(*masters) if wanted and _current is not None else None
