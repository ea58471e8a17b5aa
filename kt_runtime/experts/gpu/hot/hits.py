"""The device's part of a call with hot experts: the weighted sum of the pairs whose expert has a slot.

Slots that hold packed weights are dequantized here, those with rows only, some at a time. Which ones these are is known
on the device alone: the host knows how many there may be, min(P, S), and queues as much work.

T tokens, K experts a token, P = T * K pairs, S slots, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from kt_runtime.experts.gpu.hot.slots import PackedSlots, PlainSlots
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
def hit_sum(x: Tensor, slot_ids: Tensor, weights: Tensor, slots: PlainSlots | PackedSlots, out: Tensor) -> None:
    """out[t] = sum over k of weights[t, k] * expert(slot_ids[t, k], x[t]), k ascending; out float32 [T, H].

    x [T, H] in the dtype of `slots`; slot_ids int32 [T, K], -1: a miss, not added; weights [T, K] float32.
    Products are rounded as `routed_mlp.py` says. On the current stream.
    """
    pairs = sorted_pairs(slot_ids, slots.num_slots)
    rows = x[pairs.tokens]
    if isinstance(slots, PlainSlots):
        outputs = _outputs(slots.w13, slots.w2, pairs.ends, rows)
    else:
        outputs = _outputs_of_packed(slots, pairs.ends, rows)
    weighted_sum(outputs, pairs, weights, out)


def _outputs(w13: Tensor, w2: Tensor, ends: Tensor, rows: Tensor) -> Tensor:
    """The experts' outputs [P, H]. ends int32 [n]; rows after the last end belong to no expert."""
    return expert_forward(ExpertWeights(w13, w2, _LateEnds(ends), ends), rows)[0]


def _outputs_of_packed(slots: PackedSlots, ends: Tensor, rows: Tensor) -> Tensor:
    used, ends = _used_first(ends, min(len(rows), slots.num_slots))
    if len(used) <= slots.at_once:
        return _outputs(*slots.weights(used), ends, rows)
    place = torch.arange(len(rows), device=rows.device)
    outputs, begin = torch.zeros((), dtype=rows.dtype, device=rows.device), torch.zeros_like(ends[:1])
    for first in range(0, len(used), slots.at_once):
        some = slice(first, first + slots.at_once)
        own = ends[some]
        # Grouped products take these experts' rows from row 0 on; their results are moved back to their places.
        shifted = rows[(place + begin).clamp(max=len(rows) - 1)]
        done = _outputs(*slots.weights(used[some]), own - begin, shifted)
        is_own = (place >= begin) & (place < own[-1])
        outputs = torch.where(is_own[:, None], done[(place - begin).clamp(min=0)], outputs)
        begin = own[-1:]
    return outputs


def _used_first(ends: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """int64 [most]: the slots with rows, ascending, then others without; int32 [most]: the row after the last of each.

    ends int32 [S]; at most `most` slots have rows.
    """
    sizes = ends.diff(prepend=torch.zeros_like(ends[:1]))
    order = torch.sort((sizes == 0).to(torch.int8), stable=True).indices[:most]
    return order, torch.where(sizes[order] == 0, ends[-1], ends[order])
