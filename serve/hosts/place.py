"""This host among the hosts of a server: `--nnodes`, `--node-rank`, `--dist-init-addr`, named as SGLang names them."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

import psutil

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.serve.options.named import ServeOptions

EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True)
class HostPlace:
    """Host `number` of `count`. Host 0 listens at `address` (of IP) and `port`; `text`: both as the user wrote them."""

    number: int
    count: int
    address: str
    port: int
    text: str


def host_place(options: ServeOptions) -> HostPlace | None:
    """None with one host. Raises InvalidValueError for options that name no place, or ranks that can't be split."""
    if options.nnodes == 1:
        if options.node_rank:
            raise InvalidValueError(f"--node-rank {options.node_rank}: --nnodes is 1; allowed is 0")
        return None
    if options.node_rank >= options.nnodes:
        raise InvalidValueError(
            f"--node-rank {options.node_rank}: --nnodes is {options.nnodes}; allowed are 0 to {options.nnodes - 1}"
        )
    if options.tp_size % options.nnodes:
        raise InvalidValueError(
            f"--tp-size {options.tp_size}: {options.tp_size} ranks can't be split evenly over {options.nnodes} hosts "
            "(--nnodes)"
        )
    if options.dist_init_addr is None:
        raise InvalidValueError(
            f"--nnodes {options.nnodes}: hosts need --dist-init-addr HOST:PORT, an address of host 0 that all reach"
        )
    host, port = _host_and_port(options.dist_init_addr)
    address = _resolved(options.dist_init_addr, host, port)
    return HostPlace(options.node_rank, options.nnodes, address, port, options.dist_init_addr)


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidValueError(
            f"--dist-init-addr {text!r}: must be HOST:PORT, with a port of 1 to 65535, as in 10.0.0.1:20000"
        )
    if host in EVERYWHERE:
        raise InvalidValueError(
            f"--dist-init-addr {text!r}: {host} is no address that other hosts reach; name host 0's"
        )
    return host, int(port)


def _resolved(text: str, host: str, port: int) -> str:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidValueError(f"--dist-init-addr {text!r}: {host} has no address ({error})") from None
    return str(found[0][4][0])


def listening(place: HostPlace, port: int | None = None) -> socket.socket:
    """A socket that listens at the place's address, at its port or at `port` (0: a free one), and nowhere else.

    Raises InvalidValueError where the address is none of this machine's, ConflictError where the port is taken.
    """
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((place.address, place.port if port is None else port))
        opened.listen(128)
    except OSError as error:
        opened.close()
        if error.errno == errno.EADDRINUSE:
            raise ConflictError(f"--dist-init-addr {place.text}: the port is in use; choose another one") from None
        raise InvalidValueError(
            f"--dist-init-addr {place.text}: host 0 (--node-rank 0) can't listen there ({error.strerror}); it must be "
            "an address of this machine"
        ) from None
    return opened


def interface_of(address: str) -> str | None:
    """The network interface that has this IP address; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return "lo" if address.startswith("127.") else None
