"""One thread waits for all of gloo's sockets of a process.

Symbol (SGLang 0.5.23): `distributed.parallel_state.GroupCoordinator` makes the groups. Patched is what it calls:
`_create_gloo_process_group` of torch 2.14's `distributed_c10d`, which has no option for it. Reason: each group gets a
device of its own, whose thread wakes a hundred times a second, and SGLang makes about 20 groups, also in a server of
one rank. They were most of what an idle rank used of a processor. A device serves any number of groups.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = ("sglang.srt.distributed.parallel_state.GroupCoordinator",)

_shared: dict[int, list[Any]] = {}
"""Devices of the first group, by process id, since a fork has no threads. Torch chooses them by GLOO_SOCKET_IFNAME or
the host's name."""


def install(hooks: Hooks) -> None:
    module: Any = importlib.import_module("torch.distributed.distributed_c10d")
    original = module._create_gloo_process_group
    if not isinstance(original, partial):  # not patched before, in the same process
        module._create_gloo_process_group = partial(_create, original)


def _create(original: Callable[[Any, Any], Any], asked: Any, backend_options: Any) -> Any:
    """`asked`: torch's description of the group."""
    from torch.distributed import ProcessGroupGloo

    if (devices := _shared.get(os.getpid())) is None:
        made = original(asked, backend_options)
        _shared[os.getpid()] = list(made.options._devices)
        return made
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = devices, asked.timeout
    options.enable_reconfigure = asked.enable_reconfigure
    options.global_ranks_in_group, options.group_name = asked.global_ranks_in_group, asked.group_id
    return gloo(asked.store, asked.group_rank, asked.group_size, options)
