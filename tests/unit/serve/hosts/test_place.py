"""Where a host is among the hosts of a server, and what is refused with both values."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.serve.hosts.place import HostPlace, host_place, interface_of, listening
from kt_runtime.serve.options.named import ServeOptions

TWO: dict[str, Any] = {"tp_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:20000"}


def test_one_host_has_no_place() -> None:
    assert host_place(ServeOptions(model="m", tp_size=2)) is None


@pytest.mark.parametrize(("text", "address"), [("127.0.0.2:20000", "127.0.0.2"), ("[::1]:20000", "::1")])
def test_a_host_has_a_number_and_knows_host_0(text: str, address: str) -> None:
    place = host_place(ServeOptions(model="m", **{**TWO, "node_rank": 1, "dist_init_addr": text}))
    assert place == HostPlace(1, 2, address, 20000, text)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"nnodes": 1, "node_rank": 1}, r"--node-rank 1: --nnodes is 1; allowed is 0"),
        ({"node_rank": 2}, r"--node-rank 2: --nnodes is 2; allowed are 0 to 1"),
        ({"tp_size": 4, "nnodes": 3}, r"--tp-size 4: 4 ranks can't be split evenly over 3 hosts \(--nnodes\)"),
        ({"tp_size": 1}, r"--tp-size 1: 1 ranks can't be split evenly over 2 hosts"),
        ({"dist_init_addr": None}, r"--nnodes 2: hosts need --dist-init-addr HOST:PORT"),
        ({"dist_init_addr": "10.0.0.1"}, r"--dist-init-addr '10.0.0.1': must be HOST:PORT"),
        ({"dist_init_addr": "10.0.0.1:0"}, r"--dist-init-addr '10.0.0.1:0': must be HOST:PORT, with a port of 1 to"),
        ({"dist_init_addr": "0.0.0.0:20000"}, r"--dist-init-addr '0.0.0.0:20000': 0.0.0.0 is no address that other"),
        ({"dist_init_addr": "no.such.invalid:1"}, r"--dist-init-addr 'no.such.invalid:1': no.such.invalid has no"),
    ],
)
def test_what_names_no_place_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidValueError, match=problem):
        host_place(ServeOptions(model="m", **{**TWO, **given}))


@pytest.mark.parametrize(("name", "value"), [("nnodes", 0), ("node_rank", -1)])
def test_numbers_have_a_lowest_value(name: str, value: int) -> None:
    with pytest.raises(InvalidValueError, match=f"--{name.replace('_', '-')} {value}: must be at least"):
        ServeOptions(model="m", **{**TWO, name: value})


def test_host_0_listens_at_its_address_only() -> None:
    with listening(HostPlace(0, 2, "127.0.0.1", 1, "127.0.0.1:1"), 0) as opened:
        port = opened.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), 5)
        with pytest.raises(ConflictError, match=f"--dist-init-addr 127.0.0.1:{port}: the port is in use"):
            listening(HostPlace(0, 2, "127.0.0.1", port, f"127.0.0.1:{port}"))
    with pytest.raises(InvalidValueError, match=r"--dist-init-addr 192\.0\.2\.1:1: host 0 .* can't listen there"):
        listening(HostPlace(0, 2, "192.0.2.1", 1, "192.0.2.1:1"), 0)


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == "lo"
    assert interface_of("192.0.2.1") is None
