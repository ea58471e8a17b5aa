"""The device's part of a call with hot experts: the weighted sum of the pairs whose expert has a slot.

T tokens, K experts a token, S slots, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from kt_runtime.experts.gpu.pairs import sorted_pairs, weighted_sum
from kt_runtime.experts.gpu.routed_mlp import ExpertWeights, expert_forward


class _LateEnds(Sequence[int]):
    """`Pairs.ends` on the host, read when they are first asked for: grouped products ask the device alone, so that the
    calling thread waits for nothing. Products in a loop over the slots need them here."""

    def __init__(self, ends: Tensor) -> None:
        self._ends: Tensor | list[int] = ends

    def _read(self) -> list[int]:
        if isinstance(self._ends, Tensor):
            self._ends = self._ends.tolist()
        return self._ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._read()[index]


@torch.no_grad()
def hit_sum(x: Tensor, slot_ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, out: Tensor) -> None:
    """out[t] = sum over k of weights[t, k] * expert(slot_ids[t, k], x[t]), k ascending; out float32 [T, H].

    x [T, H] in the dtype of w13 [S, 2I, H] and w2 [S, H, I]; slot_ids int32 [T, K], -1: a miss, not added; weights
    [T, K] float32.
    Products are rounded as `routed_mlp.py` says. On the current stream.
    """
    pairs = sorted_pairs(slot_ids, w13.shape[0])
    experts = ExpertWeights(w13, w2, _LateEnds(pairs.ends), pairs.ends)
    rows, _ = expert_forward(experts, x[pairs.tokens])
    weighted_sum(rows, pairs, weights, out)
