"""This process among the ranks of the server.

SGLang starts the ranks, one scheduler process each, and connects them by torch.distributed, in which nothing else takes
part. Symbol (SGLang 0.5.23): `layers.sampler.SYNC_TOKEN_IDS_ACROSS_TP` is set. Reason: every rank samples, and all must
agree on the tokens, whatever their random states are. SGLang's environment variable would also ask for NCCL.
"""

from __future__ import annotations

from functools import cache

import torch.distributed as dist

from kt_runtime.ranks import Exchange, GroupExchange

SYMBOLS = ("sglang.srt.layers.sampler.SYNC_TOKEN_IDS_ACROSS_TP",)


def num_ranks() -> int:
    """1 in a process that is no rank, such as the frontend."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def exchange() -> Exchange | None:
    """None in a server of one rank."""
    return _exchange() if num_ranks() > 1 else None


def agree_on_tokens() -> None:
    """To be called once the ranks are connected."""
    if num_ranks() > 1:
        from sglang.srt.layers import sampler

        sampler.SYNC_TOKEN_IDS_ACROSS_TP = True


@cache
def _exchange() -> GroupExchange:
    assert dist.group.WORLD is not None
    return GroupExchange(dist.group.WORLD)
