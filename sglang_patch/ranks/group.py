"""This process among the ranks of the server.

Symbols (SGLang 0.5.23): `runtime_context.get_parallel`, which is read: SGLang starts the ranks, one scheduler process
each, and connects them. `layers.sampler.SYNC_TOKEN_IDS_ACROSS_TP` is set. Reason: every rank samples, and they must
agree on the tokens, whatever their random states are. SGLang's environment variable would also ask for NCCL.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kt_runtime.ranks import Exchange, GroupExchange

SYMBOLS = ("sglang.srt.runtime_context.get_parallel", "sglang.srt.layers.sampler.SYNC_TOKEN_IDS_ACROSS_TP")


def num_ranks() -> int:
    return int(_parallel().tp_size)


def rank() -> int:
    return int(_parallel().tp_rank)


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
    return GroupExchange(_parallel().tp_group.device_group)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
