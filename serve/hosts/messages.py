"""What hosts tell each other over TCP: msgpack behind 4 bytes of length, big-endian. Nothing else is accepted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

import msgspec

from kt_runtime.errors import ProtocolError
from kt_runtime.ranks.failures import Failure

MOST_BYTES = 1 << 20
LENGTH = struct.Struct(">I")
# The kernel ends a connection whose other end acknowledges nothing for so long: a link or a machine that is down.
DEAD_LINK_SECONDS = 3


class Hello(msgspec.Struct, tag="hello", kw_only=True):
    """From host `number` to host 0. `facts`: what must be equal on all hosts, by name."""

    number: int
    facts: dict[str, str]


class Ask(msgspec.Struct, tag="ask", kw_only=True):
    """From host 0: what does your clock say, is a file of this name in your --adapter-dir, and this path a file?
    `job_file`: in --finetuning-dir; None: there is none, or it lies in --adapter-dir."""

    adapter_file: str
    job_file: str | None = None


class Answer(msgspec.Struct, tag="answer", kw_only=True):
    """`time_s`: seconds since 1970. `adapter_directory`: this host's."""

    time_s: float
    has_adapter_file: bool
    adapter_directory: str
    has_job_file: bool = True


class Agreed(msgspec.Struct, tag="agreed", kw_only=True):
    """All hosts may load. `store_port`: where torch's store listens, at host 0's address. `addresses`: the hosts'."""

    store_port: int
    addresses: list[str]


class ProcessLook(msgspec.Struct, kw_only=True):
    """A rank's process. `main_seconds`: processor time of its main thread."""

    rank: int
    pid: int
    stopped: bool
    main_seconds: float


class Alive(msgspec.Struct, tag="alive", kw_only=True):
    """Sent once a second, both ways. `has_ranks`: the host has started its ranks. `processes`: those that live."""

    has_ranks: bool = False
    processes: list[ProcessLook] = msgspec.field(default_factory=list)


class Failed(msgspec.Struct, tag="failed", kw_only=True):
    """To host 0: the sender's ranks have failed."""

    why: str
    kind: int
    status: int

    def failure(self) -> Failure:
        return Failure(self.why, self.kind, self.status)


class Leaving(msgspec.Struct, tag="leaving", kw_only=True):
    """To host 0: this host was asked to end, so the server must."""


class End(msgspec.Struct, tag="end", kw_only=True):
    """From host 0: end with `status`; 0: in order. `lines`: why."""

    lines: list[str]
    status: int


Message = Hello | Ask | Answer | Agreed | Alive | Failed | Leaving | End
_decoder = msgspec.msgpack.Decoder(Message)


class Stream:
    """One connection between two hosts. `peer`, `own`: the IP addresses of its ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        opened = writer.get_extra_info("socket")
        self.peer, self.own = str(opened.getpeername()[0]), str(opened.getsockname()[0])
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_LINK_SECONDS - 1),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_LINK_SECONDS),
        ):
            opened.setsockopt(level, option, value)

    async def send(self, message: Message) -> None:
        """Raises OSError once the connection has ended."""
        data = msgspec.msgpack.encode(message)
        self._writer.write(LENGTH.pack(len(data)) + data)
        await self._writer.drain()

    async def receive(self) -> Message:
        """Raises OSError once the connection has ended, ProtocolError for what is no message."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > MOST_BYTES:
                raise ProtocolError(f"a message of {length} bytes from {self.peer}; allowed are {MOST_BYTES}")
            data = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError:
            raise ConnectionError("the connection was closed") from None
        try:
            received: Any = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a message from {self.peer} can't be read: {error}") from None
        return received  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Sends what is still buffered, and ends the connection."""
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)


async def connected(address: str, port: int) -> Stream:
    """Raises OSError."""
    reader, writer = await asyncio.open_connection(address, port)
    return Stream(reader, writer)
