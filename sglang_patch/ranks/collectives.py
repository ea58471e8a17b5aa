"""What SGLang's ranks send each other for each token goes through the exchange, not through gloo.

Symbols (SGLang 0.5.23): `distributed.parallel_state.GroupCoordinator.all_gather`, by which the head's logits are
gathered; `layers.sampler.Sampler._sync_token_ids_across_tp`, which takes the smallest of the ranks' tokens. Reason:
gloo takes some hundred microseconds where shared memory takes a few, and sends three messages for one between machines.
What else SGLang sends stays gloo's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kt_runtime.ranks.native import DTYPES
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group

SYMBOLS = (
    "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather",
    "sglang.srt.layers.sampler.Sampler._sync_token_ids_across_tp",
)


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.around(SYMBOLS[0], all_gather)
        hooks.around(SYMBOLS[1], smallest_tokens)


def all_gather(
    original: Callable[..., Any], coordinator: Any, input_: torch.Tensor, dim: int = -1, *args: Any, **kwargs: Any
) -> Any:
    """[T, C] of each rank -> [T, N * C]; other shapes, types and groups are left to SGLang."""
    exchange = group.exchange()
    is_plain = not args and not kwargs and input_.dim() == 2 and dim in (-1, 1) and input_.dtype in DTYPES
    if exchange is None or not is_plain or coordinator.world_size != exchange.share.num_ranks:
        return original(coordinator, input_, dim, *args, **kwargs)
    return exchange.all_columns(input_)


def smallest_tokens(original: Callable[..., Any], sampler: Any, tokens: torch.Tensor, info: Any) -> None:
    """[B], in place."""
    exchange = group.exchange()
    if exchange is None:
        original(sampler, tokens, info)
    else:
        tokens.copy_(exchange.all_columns(tokens.view(-1, 1)).amin(1))
