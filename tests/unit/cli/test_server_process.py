"""How a command finds a port for the server that it starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kt_runtime.cli import server_process
from kt_runtime.cli.server_process import free_port

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not OUTGOING.exists(), reason="Linux says there which ports outgoing connections get")
def test_a_port_for_a_server_is_none_that_a_connection_gets_meanwhile() -> None:
    first, last = map(int, OUTGOING.read_text().split())
    assert all(not first <= free_port() <= last for _ in range(20))


def test_a_taken_port_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(server_process, "PORTS", range(port, port + 100))
        assert {free_port() for _ in range(20)} <= set(range(port + 1, port + 100))


def test_where_all_are_taken_the_kernel_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(server_process, "PORTS", [port] * 100)
        assert free_port() != port
