"""TCP connections between ranks of several machines, one between each two, for the exchange through sockets.

A rank listens at its host's address until all others have connected. Each draws a secret, which the ranks tell each
other through their group; whoever connects must state the secrets of both ends, and the other end answers with its own.
Neither the secrets nor what follows is encrypted (docs/scale.md: the network between hosts is private).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch.distributed as dist

from kt_runtime import _experts
from kt_runtime.errors import RuntimeFault
from kt_runtime.ranks.native import NativeExchange
from kt_runtime.ranks.share import Share

T = TypeVar("T")

CONNECT_SECONDS = 60.0
"""Longest wait until all ranks have connected. Each is running: they have just exchanged their addresses."""
SECRET_BYTES = 32
GREETING = struct.Struct(f"!I{SECRET_BYTES}s{SECRET_BYTES}s")
"""The connecting rank's greeting: its number, the other's secret, its own secret. The answer is the other's secret."""

# Keepalive probes on idle connections: one whose other end is lost fails after 6 s. A limit on unacknowledged bytes
# (TCP_USER_TIMEOUT) would also end connections to a rank that computes for longer.
OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


@dataclass(frozen=True)
class Place:
    """Where a rank listens, its process, and its secret."""

    address: str
    port: int
    pid: int
    secret: bytes


def sockets_of(group: dist.ProcessGroup, address: str, connect_s: float = CONNECT_SECONDS) -> NativeExchange:
    """The exchange of the group's ranks, every one of which must call it. `address`: that of this machine's interface
    that the others reach. Raises RuntimeFault, on all ranks, if one of them can't connect."""
    share = Share(dist.get_rank(group), dist.get_world_size(group))
    with contextlib.ExitStack() as kept:
        listening, problem = None, ""
        try:
            listening = kept.enter_context(_listening(address))
        except OSError as error:
            problem = f"rank {share.rank} can't listen at {address}: {error.strerror}"
        port = 0 if listening is None else int(listening.getsockname()[1])
        places = _from_all(group, Place(address, port, os.getpid(), secrets.token_bytes(SECRET_BYTES)))
        _raise_for_all(group, problem)
        assert listening is not None
        links: dict[int, socket.socket] = {}
        kept.callback(_close, links)
        try:
            connect(listening, places, share.rank, links, connect_s)
        except OSError as error:
            problem = f"rank {share.rank} has no connection to all others: {error}"
        _raise_for_all(group, problem)
        names = [f"rank {n} (process {place.pid} at {place.address})" for n, place in enumerate(places)]
        descriptors = [-1 if n == share.rank else links[n].detach() for n in range(share.num_ranks)]
        return NativeExchange(share, _experts.Exchange.connected(share.rank, descriptors, names))


def connect(
    listening: socket.socket, places: Sequence[Place], rank: int, links: dict[int, socket.socket], seconds: float
) -> None:
    """Adds the connections to all other ranks to `links`: to lower ranks this rank connects, from higher ones it waits
    for the greeting. Raises OSError."""
    deadline = time.monotonic() + seconds
    for other in range(rank):
        link = socket.create_connection((places[other].address, places[other].port), seconds)
        links[other] = link
        link.sendall(GREETING.pack(rank, places[other].secret, places[rank].secret))
    _accept(listening, places, rank, links, deadline)
    for other in range(rank):
        if not hmac.compare_digest(_answer(links[other], deadline), places[other].secret):
            raise ConnectionError(f"who listens at {places[other].address}:{places[other].port} is not rank {other}")
    for link in links.values():
        for level, option, value in OPTIONS:
            link.setsockopt(level, option, value)


def _close(links: dict[int, socket.socket]) -> None:
    """Closes the connections; the exchange has detached those that it owns, which stay open."""
    for link in links.values():
        link.close()


def _answer(link: socket.socket, deadline: float) -> bytes:
    """The other rank's answer, at most as many bytes as a secret has."""
    found = b""
    while len(found) < SECRET_BYTES:
        link.settimeout(max(0.01, deadline - time.monotonic()))
        came = link.recv(SECRET_BYTES - len(found))
        if not came:
            break
        found += came
    return found


def _accept(
    listening: socket.socket, places: Sequence[Place], rank: int, links: dict[int, socket.socket], deadline: float
) -> None:
    """Accepts the connections of all higher ranks. Others that connect are ignored and delay the ranks no further."""
    listening.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        try:
            while missing := set(range(rank + 1, len(places))) - links.keys():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"rank {min(missing)} has not connected")
                for key, _ in ready:
                    if key.data is None:
                        _begin(listening, selector)
                    elif not _hears_more(key):
                        link = _socket(selector.unregister(key.fileobj))
                        other = _greeted(bytes(key.data), places, rank)
                        if other in missing - links.keys():
                            link.setblocking(True)
                            link.sendall(places[rank].secret)
                            links[other] = link
                        else:
                            link.close()
        finally:
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    _socket(key).close()


def _begin(listening: socket.socket, selector: selectors.BaseSelector) -> None:
    with contextlib.suppress(BlockingIOError, ConnectionError):  # the connection has ended already
        link, _ = listening.accept()
        link.setblocking(False)
        selector.register(link, selectors.EVENT_READ, bytearray())


def _hears_more(key: selectors.SelectorKey) -> bool:
    """Appends received bytes to the connection's greeting. False: it is complete, or the connection has ended."""
    try:
        came = _socket(key).recv(GREETING.size - len(key.data))
    except BlockingIOError:
        return True
    except OSError:
        return False
    key.data.extend(came)
    return bool(came) and len(key.data) < GREETING.size


def _greeted(greeting: bytes, places: Sequence[Place], rank: int) -> int:
    """Number of the rank that sent this greeting; -1: no rank did."""
    if len(greeting) != GREETING.size:
        return -1
    other, of_this, own = GREETING.unpack(greeting)
    if other >= len(places) or not hmac.compare_digest(of_this, places[rank].secret):
        return -1
    return int(other) if hmac.compare_digest(own, places[other].secret) else -1


def _socket(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket)
    return key.fileobj


def _listening(address: str) -> socket.socket:
    opened = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.bind((address, 0))
        opened.listen(128)
    except OSError:
        opened.close()
        raise
    return opened


def _from_all(group: dist.ProcessGroup, own: T) -> list[T]:
    found: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return cast(list[T], found)


def _raise_for_all(group: dist.ProcessGroup, problem: str) -> None:
    if problems := list(filter(None, _from_all(group, problem))):
        raise RuntimeFault(f"the ranks can't connect: {'; '.join(problems)}")
