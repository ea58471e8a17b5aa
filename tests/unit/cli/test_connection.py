"""Which servers a trainer may talk to: those of its machine, under any of its addresses."""

from __future__ import annotations

import socket

import pytest

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.errors import InvalidValueError, ServerUnreachableError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.0.0.2", socket.gethostname()])
def test_an_address_of_this_machine_is_asked(host: str) -> None:
    with pytest.raises(ServerUnreachableError):  # nobody listens there
        resident_client(ServerAPI(f"http://{host}:9"))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_another_machine_is_refused_before_it_is_asked(host: str) -> None:
    with pytest.raises(InvalidValueError, match="so it runs on that machine"):
        resident_client(ServerAPI(f"http://{host}:9"))
