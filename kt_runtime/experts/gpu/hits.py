"""The device's part of a call with hot experts: the weighted sum of the pairs whose expert has a slot.

T tokens, K experts a token, P = T * K pairs, S slots, H hidden, I intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def hit_sum(x: Tensor, slot_ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """float32 [T, H]: sum over k of weights[t, k] * expert(slot_ids[t, k], x[t]), k ascending; a miss adds nothing.

    x [T, H] in the dtype of w13 [S, 2I, H] and w2 [S, H, I]; slot_ids int32 [T, K], -1: a miss; weights [T, K]. Each of
    an expert's two products is rounded once to x's dtype, and so is the product of SiLU and up. Nothing is awaited.
    """
    top_k, num_slots = slot_ids.shape[1], w13.shape[0]
    flat = slot_ids.reshape(-1).to(torch.int64)
    keys, order = torch.sort(torch.where(flat < 0, num_slots, flat), stable=True)
    ends = torch.searchsorted(keys, torch.arange(num_slots, device=x.device), right=True).to(torch.int32)
    rows = x[torch.div(order, top_k, rounding_mode="floor")]
    gate, up = functional.grouped_mm(rows, w13.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    inner = functional.silu(gate.float()).mul_(up.float()).to(x.dtype)
    computed = functional.grouped_mm(inner, w2.transpose(1, 2), offs=ends)
    places = torch.empty_like(order)
    places.scatter_(0, order, torch.arange(order.numel(), device=x.device))
    return _weighted_sum(computed, places.view(slot_ids.shape), slot_ids >= 0, weights)


def _weighted_sum(computed: Tensor, places: Tensor, is_hit: Tensor, weights: Tensor) -> Tensor:
    """A row of `computed` that no slot has computed may hold anything: it is not added."""
    total = torch.zeros(places.shape[0], computed.shape[1], dtype=torch.float32, device=computed.device)
    for k in range(places.shape[1]):
        row = torch.where(is_hit[:, k, None], computed[places[:, k]], 0)
        total.add_(row.float() * weights[:, k, None].float())
    return total
