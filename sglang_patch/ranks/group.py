"""This process among the ranks of the server.

SGLang starts the ranks, one scheduler process each, and connects them by torch.distributed, in which nothing else takes
part. What a step sends goes another way: between ranks of one machine through shared memory, which takes microseconds,
between machines through sockets. A call of gloo takes some hundred microseconds and sends three messages for one.

Symbols (SGLang 0.5.23): `runtime_context.get_parallel` says over how many machines the ranks are.
`layers.sampler.SYNC_TOKEN_IDS_ACROSS_TP` is set. Reason: every rank samples, and all must agree on the tokens, whatever
their random states are. SGLang's environment variable would also ask for NCCL.
"""

from __future__ import annotations

import logging
from functools import cache

import torch.distributed as dist

from kt_runtime.errors import RuntimeFault
from kt_runtime.ranks import Exchange, HashingGroup, shared_memory_of, sockets_of
from kt_runtime.ranks.hashing_group import PATIENCE
from kt_runtime.resident.config import ResidentSettings

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

SYMBOLS = ("sglang.srt.layers.sampler.SYNC_TOKEN_IDS_ACROSS_TP", "sglang.srt.runtime_context.get_parallel")


def num_ranks() -> int:
    """1 in a process that is no rank, such as the frontend."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def exchange() -> Exchange | None:
    """None in a server of one rank."""
    return _exchange() if num_ranks() > 1 else None


def hashing_group() -> HashingGroup | None:
    """None in a server of one rank. All ranks call it at the same place, once."""
    if num_ranks() == 1:
        return None
    made = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(made, dist.ProcessGroup)  # this rank is in it
    return HashingGroup(made)


def agree_on_tokens() -> None:
    """To be called once the ranks are connected."""
    if num_ranks() > 1:
        from sglang.srt.layers import sampler

        sampler.SYNC_TOKEN_IDS_ACROSS_TP = True


@cache
def _exchange() -> Exchange:
    """All ranks call it first at the same place: they are connected then."""
    from sglang.srt.runtime_context import get_parallel

    assert dist.group.WORLD is not None
    if get_parallel().nnodes == 1:
        try:
            return shared_memory_of(dist.group.WORLD)
        except RuntimeFault as error:  # on all ranks
            logger.warning("%s; they exchange through sockets, which is slower", error)
    settings = ResidentSettings.from_environment()
    address = "" if settings is None else settings.host_address  # empty with one host
    return sockets_of(dist.group.WORLD, address or LOOPBACK)
