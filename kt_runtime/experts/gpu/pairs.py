"""The (token, expert) pairs of a call on a device, sorted by expert.

The sort puts the rows of an expert side by side, which a grouped product takes as they are. Pairs of one expert keep
the order of the call, pairs that are not routed come last. T tokens, K experts a token, P = T * K pairs, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kt_runtime.experts.gpu.call import Check


@dataclass(frozen=True)
class Pairs:
    """All tensors are on the call's device; sorting waits for nothing."""

    order: Tensor
    """int64 [P]: row -> pair, which is t * K + k."""
    places: Tensor
    """int64 [T, K]: pair -> row."""
    ends: Tensor
    """int32 [E]: the row after the last one of each expert."""
    top_k: int

    @property
    def tokens(self) -> Tensor:
        """int64 [P]: row -> token."""
        return torch.div(self.order, self.top_k, rounding_mode="floor")


def sorted_pairs(ids: Tensor, num_experts: int) -> Pairs:
    """ids [T, K] int32 or int64, -1: not routed. An id out of range counts as not routed, until it is checked."""
    flat = ids.detach().reshape(-1).to(torch.int64)
    routed = (flat >= 0) & (flat < num_experts)
    keys, order = torch.sort(torch.where(routed, flat, num_experts), stable=True)
    places = torch.empty_like(order)
    places.scatter_(0, order, torch.arange(order.numel(), device=order.device))
    ends = torch.searchsorted(keys, torch.arange(num_experts, device=order.device), right=True)
    return Pairs(order, places.view(ids.shape), ends.to(torch.int32), ids.shape[1])


def checked_ends(pairs: Pairs, checks: Sequence[Check]) -> list[int]:
    """`pairs.ends` on the host. One copy to the host, which the calling thread waits for, also answers the checks.

    Raises the failure of the first check that some token does not pass, for its first token.
    """
    tokens = pairs.places.shape[0]
    if not tokens:
        return [0] * pairs.ends.numel()
    number = torch.arange(tokens, device=pairs.ends.device)
    first = [torch.where(check.bad.reshape(tokens, -1).any(1), number, tokens).amin()[None] for check in checks]
    found = torch.cat([pairs.ends.to(torch.int64), *first]).tolist()
    ends, firsts = found[: pairs.ends.numel()], found[pairs.ends.numel() :]
    for check, token in zip(checks, firsts, strict=True):
        if token < tokens:
            raise check.failure(token)
    return ends


def sizes_of(ends: Sequence[int]) -> list[int]:
    """The number of rows of each expert."""
    return [end - begin for begin, end in zip((0, *ends[:-1]), ends, strict=True)]


def weighted_sum(rows: Tensor, pairs: Pairs, weights: Tensor, out: Tensor) -> None:
    """out[t] = sum over k of weights[t, k] * rows[places[t, k]], k ascending, in float32, rounded once to out's dtype.

    rows [P, H]. A row without an expert may hold anything: it is not added.
    """
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    routed = pairs.places < pairs.ends[-1]
    for k in range(pairs.top_k):
        row = torch.where(routed[:, k, None], rows[pairs.places[:, k]], 0)
        total.add_(row.to(torch.float32) * weights[:, k, None].to(torch.float32))
    out.copy_(total)


def sum_of_pairs(rows: Tensor, pairs: Pairs, out: Tensor) -> None:
    """`weighted_sum` with weights of one."""
    weighted_sum(rows, pairs, torch.ones(pairs.places.shape, dtype=torch.float32, device=out.device), out)
