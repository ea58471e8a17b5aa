"""How a server's ranks find each other: a store of torch's that listens at one address, or at none.

SGLang 0.5.23 symbol: the environment variable SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE, which takes the place of its
tcp:// address. Reason: torch's TCPStore listens on all interfaces, whatever address it is given, and who reaches it
can write to it. A server of one rank needs no store.

    kt-runtime://alone                 one rank: a store in its memory
    kt-runtime://HOST:PORT?fd=N        rank 0 has inherited the descriptor N of a socket that listens there
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = ("sglang.srt.environ.envs",)
VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
SCHEME = "kt-runtime"
ALONE = f"{SCHEME}://alone"
DEFAULT_TIMEOUT = timedelta(minutes=30)


def install(hooks: Hooks) -> None:
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function has its name in the package
    if SCHEME not in rendezvous._rendezvous_handlers:
        rendezvous.register_rendezvous_handler(SCHEME, _meet)


def at(listening: socket.socket, host: str, port: int) -> str:
    """The address for ranks that inherit `listening`, and for those of other hosts."""
    return f"{SCHEME}://{f'[{host}]' if ':' in host else host}:{port}?fd={listening.fileno()}"


def elsewhere(host: str, port: int) -> str:
    """The address for the ranks of a host that has not rank 0."""
    return f"{SCHEME}://{f'[{host}]' if ':' in host else host}:{port}?fd=none"


def _meet(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """A handler of torch.distributed.rendezvous, which adds `rank` and `world_size` to the query."""
    from torch.distributed import HashStore, TCPStore

    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    rank, size = int(query["rank"]), int(query["world_size"])
    if parts.port is None:
        assert size == 1, f"{url} is for one rank"
        yield HashStore(), rank, size
        return
    listening = int(query["fd"]) if rank == 0 else None
    host = str(parts.hostname)
    yield TCPStore(host, parts.port, size, rank == 0, timeout=timeout, master_listen_fd=listening), rank, size
