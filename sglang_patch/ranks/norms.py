"""Norms over all heads of a token at once, over ranks: each has the whole weight, and gets the heads of all.

Symbol (SGLang 0.5.23): `models.minimax_m2.MiniMaxM2RMSNormTP.__init__`. Reason: SGLang gives each rank its heads' part
of the weight, and ranks add up their sums of squares: one process adds up the squares of all heads in another order.
OLMoE's norm has the whole weight in SGLang, too, which does not fit the heads of a rank.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.ops.norms import rms_norm
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group

SYMBOLS = ("sglang.srt.models.minimax_m2.MiniMaxM2RMSNormTP.__init__",)


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.after(SYMBOLS[0], hold_whole_weight)


def hold_whole_weight(_result: None, norm: Any, hidden_size: int, *args: Any, **kwargs: Any) -> None:
    """SGLang's loader copies a tensor whole into a parameter without a loader of its own."""
    if group.num_ranks() > 1:
        norm.weight = torch.nn.Parameter(torch.ones(hidden_size))


def heads_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`rms_norm`; of this rank's heads [T, N D / ranks], where the weight [N D] is that of the heads of all."""
    exchange = None if x.shape[-1] == len(weight) else group.exchange()
    if exchange is None:
        return rms_norm(x, weight, epsilon)
    whole = rms_norm(exchange.all_columns(x.contiguous()), weight, epsilon)
    return exchange.share.columns_of(whole).contiguous()
