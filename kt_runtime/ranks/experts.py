"""One layer's routed experts over ranks: each rank has some experts of the layer, and computes them for all tokens.

One process adds up a token's experts in the order in which the router has chosen them. Partial sums of ranks would be
added in another order. So ranks exchange the experts' unweighted outputs in float32, the columns that each of them is
to sum, and then do what one process does, on their columns. A pair of token and expert sends 4 H / N bytes to each of
the other N - 1 ranks. Backward does the same with the gradients that the pairs' experts have for their input.

A rank's pairs are in the order of their experts, and some experts are computed at a time: the engine's memory for a
call grows with the call's pairs. An expert's pairs stay together, so its weights are read once, and its adapter's
gradients are summed in the order of tokens.

Shapes: T tokens, K experts per token, H hidden, E experts, N ranks, P pairs of token and expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kt_runtime.errors import NumericsError
from kt_runtime.experts import ExpertGradients, ExpertLayer, LoraSlot
from kt_runtime.ranks.exchange import Exchange
from kt_runtime.ranks.share import Share

LEAST_PAIRS, MOST_PARTS = 1024, 8
"""Pairs of a rank that are computed at a time: the larger of this number and an eighth of them; whole experts only."""


@dataclass(frozen=True)
class _Pairs:
    """The pairs of token and expert of one call, in the order of tokens and positions: T * K with those that are not
    routed. `owners` [T * K]: the rank that has the expert, -1: not routed. `own` [P]: the numbers of this rank's pairs
    in the order of their experts, of an expert in that of tokens; their `tokens`, and their `experts` [P, 1] as this
    rank counts them, of `num_experts`. `order`: the numbers of all routed pairs, in the same order."""

    owners: Tensor
    order: Tensor
    own: Tensor
    tokens: Tensor
    experts: Tensor
    num_experts: int

    @classmethod
    def of(cls, ids: Tensor, held: range, share: Share) -> _Pairs:
        chosen = ids.reshape(-1).long()
        owners = torch.div(chosen, len(held), rounding_mode="floor")  # -1 of -1
        routed = (chosen >= 0).nonzero().squeeze(1)
        order = routed[torch.argsort(chosen[routed], stable=True)]  # ranks have consecutive experts
        own = order[owners[order] == share.rank]
        return cls(owners, order, own, own // ids.shape[1], (chosen[own] - held.start)[:, None], len(held))

    def parts(self) -> Iterator[slice]:
        """Slices of this rank's pairs, each with all pairs of some experts."""
        most, begin, end = max(LEAST_PAIRS, -(-len(self.own) // MOST_PARTS)), 0, 0
        for count in self._counts():
            if end > begin and end + count > begin + most:
                yield slice(begin, end)
                begin = end
            end += count
        if end > begin:
            yield slice(begin, end)

    def _counts(self) -> list[int]:
        if len(self.own) <= LEAST_PAIRS:
            return [len(self.own)]
        counts: list[int] = torch.bincount(self.experts[:, 0], minlength=self.num_experts).tolist()
        return counts

    def all_rows(self, rows: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """rows of this rank's pairs -> this rank's columns of all pairs' rows, and of each pair of [T * K] the number
        of its row, -1: not routed."""
        counts = torch.bincount(self.owners[self.order], minlength=exchange.share.num_ranks).tolist()
        received = exchange.columns_of_rows(rows, counts)
        row_of = torch.full_like(self.owners, -1)
        row_of[self.order] = torch.arange(len(self.order))
        return received, row_of


class SharedExperts:
    """`own`: the layer with this rank's experts, `exchange.share` of the model's `num_experts`."""

    def __init__(self, own: ExpertLayer, exchange: Exchange, num_experts: int) -> None:
        self._own, self._exchange = own, exchange
        self._experts = exchange.share.of(num_experts, "experts")

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        slots: Sequence[LoraSlot | None] = (),
        token_slots: Tensor | None = None,
    ) -> Tensor:
        """As `ExpertLayer.forward`: x [T, H], ids [T, K] of all experts, -1: not routed, weights [T, K] -> [T, H].

        Arguments are equal on all ranks, but for `slots`, which have this rank's experts.

        The result has this rank's columns, and -0.0 in those of others (`Share.placed`): the sum over ranks has the
        bits of one process. Raises NumericsError, on all ranks, for NaN or Inf in x or weights.
        """
        sums = self.own_columns(x, ids, weights, slots=slots, token_slots=token_slots)
        return self._exchange.share.placed(sums, x.shape[1])

    def own_columns(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        slots: Sequence[LoraSlot | None] = (),
        token_slots: Tensor | None = None,
    ) -> Tensor:
        """As `forward`, this rank's columns alone: [T, H / N]."""
        _check_finite(x=x, weights=weights)
        pairs = _Pairs.of(ids, self._experts, self._exchange.share)
        rows = torch.empty((len(pairs.own), x.shape[1]), dtype=torch.float32)
        for part in pairs.parts():
            tokens = pairs.tokens[part]
            self._own.forward(
                x[tokens],
                pairs.experts[part],
                torch.ones((len(tokens), 1)),
                slots=self._counted(slots, tokens),
                token_slots=None if token_slots is None else token_slots[tokens],
                out=rows[part],
            )
        return self._summed(pairs, rows, weights, x.dtype)

    def _counted(self, slots: Sequence[LoraSlot | None], tokens: Tensor) -> list[LoraSlot | None]:
        """`slots` with the numbers that tokens and experts have in one process, for dropout. `tokens`: those of the
        pairs."""
        first = self._experts.start
        return [slot and (replace(slot, tokens=tokens, first_expert=first) if slot.dropout else slot) for slot in slots]

    def _summed(self, pairs: _Pairs, rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """rows [P, H] of this rank's pairs -> this rank's columns of the tokens' weighted sums, [T, H / N]."""
        received, row_of = pairs.all_rows(rows, self._exchange)
        sums = torch.empty((len(weights), received.shape[1]), dtype=dtype)
        return self._own.combine(received, row_of.view_as(weights), weights, sums)


class TrainedExperts(SharedExperts):
    """The same with gradients, in the place of an `ExpertLayer`: every rank gets the whole results.

    Activations are never retained: backward recomputes them, with the same bits.
    """

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        slots: Sequence[LoraSlot | None] = (),
        token_slots: Tensor | None = None,
    ) -> Tensor:
        """As `SharedExperts.forward`, but whole: [T, H] on every rank."""
        return self._exchange.all_columns(self.own_columns(x, ids, weights, slots=slots, token_slots=token_slots))

    def forward_retaining(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        slots: Sequence[LoraSlot | None] = (),
        token_slots: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        return self.forward(x, ids, weights, slots=slots, token_slots=token_slots), None

    def backward(
        self,
        grad_out: Tensor,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        slots: Sequence[LoraSlot | None] = (),
        token_slots: Tensor | None = None,
        into: Sequence[LoraSlot | None] | None = None,
        retained: None = None,
    ) -> ExpertGradients:
        """As `ExpertLayer.backward`. The gradients of `slots` are those of this rank's experts, the others are whole.

        Raises NumericsError, on all ranks, for NaN or Inf in grad_out, x or weights.
        """
        _check_finite(x=x, weights=weights, grad_out=grad_out)
        pairs = _Pairs.of(ids, self._experts, self._exchange.share)
        given: Sequence[LoraSlot | None] = [None] * len(slots) if into is None else into
        by_slots = [g if g is not None or s is None else s.zeros() for s, g in zip(slots, given, strict=True)]
        rows = torch.empty((len(pairs.own), x.shape[1]), dtype=torch.float32)
        by_weights = torch.zeros(weights.numel(), dtype=torch.float32)
        for part in pairs.parts():
            own, tokens = pairs.own[part], pairs.tokens[part]
            found = self._own.backward(
                grad_out[tokens],
                x[tokens],
                pairs.experts[part],
                weights.reshape(-1)[own][:, None],
                slots=self._counted(slots, tokens),
                token_slots=None if token_slots is None else token_slots[tokens],
                into=by_slots,
                by_x=rows[part],
            )
            by_weights[own] = found.weights.squeeze(1)
        sums = self._summed(pairs, rows, torch.ones_like(weights), x.dtype)
        return ExpertGradients(self._exchange.all_columns(sums), self._of_owners(pairs, by_weights, weights), by_slots)

    def _of_owners(self, pairs: _Pairs, own: Tensor, like: Tensor) -> Tensor:
        """[T, K]: each pair's number is that of the rank that has its expert; 0 where it is not routed."""
        everyone = self._exchange.all_columns(own[:, None])  # [T * K, N]
        chosen = everyone.gather(1, pairs.owners.clamp(min=0)[:, None]).squeeze(1)
        return torch.where(pairs.owners >= 0, chosen, 0.0).view_as(like)


def _check_finite(**matrices: Tensor) -> None:
    for name, matrix in matrices.items():
        if not bool(torch.isfinite(matrix).all()):
            raise NumericsError(f"{name} has NaN or Inf")
