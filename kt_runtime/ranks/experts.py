"""One layer's routed experts over ranks: each rank has some experts of the layer, and computes them for all tokens.

One process adds up a token's experts in the order in which the router has chosen them. Partial sums of ranks would be
added in another order. So ranks exchange the experts' unweighted outputs in float32, the columns that each of them is
to sum, and then do what one process does, on their columns. A pair of token and expert sends 4 H / N bytes to each of
the other N - 1 ranks.

Shapes: T tokens, K experts per token, H hidden, E experts, N ranks, P pairs of token and expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kt_runtime.errors import NumericsError
from kt_runtime.experts import ExpertLayer, LoraSlot
from kt_runtime.ranks.exchange import Exchange


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
        for name, matrix in (("x", x), ("weights", weights)):
            if not bool(torch.isfinite(matrix).all()):
                raise NumericsError(f"{name} has NaN or Inf")
        share, positions = self._exchange.share, ids.shape[1]
        chosen = ids.reshape(-1).long()
        owners = torch.div(chosen, len(self._experts), rounding_mode="floor")  # -1 of -1
        pairs = (owners == share.rank).nonzero().squeeze(1)
        tokens = pairs // positions
        rows = torch.empty((len(pairs), x.shape[1]), dtype=torch.float32)
        if len(pairs):
            self._own.forward(
                x[tokens],
                (chosen[pairs] - self._experts.start)[:, None],
                torch.ones((len(pairs), 1)),
                slots=slots,
                token_slots=None if token_slots is None else token_slots[tokens],
                out=rows,
            )
        routed = (owners >= 0).nonzero().squeeze(1)
        counts = torch.bincount(owners[routed], minlength=share.num_ranks).tolist()
        received = self._exchange.columns_of_rows(rows, counts)
        row_of = torch.full_like(chosen, -1)
        row_of[routed[torch.argsort(owners[routed], stable=True)]] = torch.arange(len(routed))
        sums = torch.empty((len(x), received.shape[1]), dtype=x.dtype)
        self._own.combine(received, row_of.view_as(ids), weights, sums)
        return share.placed(sums, x.shape[1])
