"""Two network namespaces of this machine, joined by a link of bounded speed: machines as far as the network goes.

A thread enters a namespace (setns(2)), and what it opens and starts afterwards is there. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

VARIABLE = "TEST_NETWORK_NAMESPACE"
"""A server of `system/forked_server.py` enters the namespace that it names."""
SPEED = "10gbit"
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class End:
    """`namespace`, `interface`: of this end of the link; `address`: its IP address."""

    namespace: str
    interface: str
    address: str

    def set(self, state: str) -> None:
        """`state`: "up" or "down"."""
        _ip("-n", self.namespace, "link", "set", self.interface, state)

    def sent_bytes(self) -> int:
        """With the headers of Ethernet, IP and TCP, and acknowledgements of what came."""
        (found,) = json.loads(_ip("-n", self.namespace, "-s", "-j", "link", "show", "dev", self.interface))
        return int(found["stats64"]["tx"]["bytes"])


@contextlib.contextmanager
def link(speed: str = SPEED) -> Iterator[tuple[End, End]]:
    """Skips the test, with the reason, where the kernel or this user's rights do not allow it."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("no network namespaces: iproute2 (ip, tc) is not installed")
    ends = [End(f"kt{os.getpid()}{side}", f"kt{side}{os.getpid()}", f"10.77.0.{n}") for n, side in enumerate("ab", 1)]
    with contextlib.ExitStack() as held:
        for end in ends:
            try:
                _ip("netns", "add", end.namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces: {error.stderr.strip()}")
            held.callback(_ip, "netns", "del", end.namespace)
        here, there = ends
        peer = ("peer", "name", there.interface, "netns", there.namespace)
        _ip("link", "add", here.interface, "netns", here.namespace, "type", "veth", *peer)
        for end in ends:
            _ip("-n", end.namespace, "address", "add", f"{end.address}/24", "dev", end.interface)
            _ip("-n", end.namespace, "link", "set", "lo", "up")
            end.set("up")
            bucket = ("tbf", "rate", speed, "burst", "4mb", "latency", "10ms")
            _run("tc", "-n", end.namespace, "qdisc", "add", "dev", end.interface, "root", *bucket)
        yield here, there


def enter(namespace: str) -> None:
    """For this thread, and what it starts."""
    with open(f"/run/netns/{namespace}") as opened:
        _enter(opened.fileno())


@contextlib.contextmanager
def within(namespace: str) -> Iterator[None]:
    """This thread is in the namespace inside the block."""
    with open("/proc/thread-self/ns/net") as before:
        enter(namespace)
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
