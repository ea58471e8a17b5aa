from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kt_runtime.errors import InvalidValueError, RequestTimeoutError
from kt_runtime.wire import ResidentClient, WireServer, codec
from kt_runtime.wire.messages import GetStatus


def key_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


SERVER_PUBLIC, SERVER_SECRET = key_pair()
CLIENT_PUBLIC, CLIENT_SECRET = key_pair()


@pytest.fixture
def tcp_server() -> Iterator[WireServer]:
    with WireServer("tcp://127.0.0.1:0", server_secret_key=SERVER_SECRET, allowed_clients=[CLIENT_PUBLIC]) as server:
        yield server


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
@pytest.mark.parametrize(
    "options, missing",
    [
        ({}, "a server secret key"),
        ({"allowed_clients": [CLIENT_PUBLIC]}, "a server secret key"),
        ({"server_secret_key": SERVER_SECRET}, "public keys of allowed clients"),
    ],
)
def test_tcp_without_keys_is_refused(host: str, options: dict[str, Any], missing: str) -> None:
    with pytest.raises(InvalidValueError, match=f"CURVE keys only.*{missing}"):
        WireServer(f"tcp://{host}:0", **options)


@pytest.mark.parametrize("key", ["", "short", "x" * 39 + "\u00fc", "~" * 40])
def test_a_key_that_is_not_z85_is_refused(key: str) -> None:
    with pytest.raises(InvalidValueError, match="not a CURVE key"):
        WireServer("tcp://127.0.0.1:0", server_secret_key=SERVER_SECRET, allowed_clients=[key])


def test_an_allowed_key_is_answered(tcp_server: WireServer, make_resident: Callable[..., Any]) -> None:
    make_resident(on=tcp_server)
    with ResidentClient(
        tcp_server.address,
        timeout_s=10,
        server_public_key=SERVER_PUBLIC,
        client_public_key=CLIENT_PUBLIC,
        client_secret_key=CLIENT_SECRET,
    ) as client:
        assert client.status().model == "tiny"


def stranger_keys() -> dict[str, str]:
    public, secret = key_pair()
    return {"server_public_key": SERVER_PUBLIC, "client_public_key": public, "client_secret_key": secret}


def test_a_client_without_a_key_gets_nothing(tcp_server: WireServer, make_peer: Callable[..., Any]) -> None:
    peer = make_peer(tcp_server.address)
    peer.send(codec.encode(GetStatus(request_id="a")))
    assert peer.is_silent(0.5)
    assert not tcp_server.has_pending


@pytest.mark.parametrize("left_out", ["server_public_key", "client_public_key", "client_secret_key"])
def test_a_client_with_some_keys_only_is_refused(tcp_server: WireServer, left_out: str) -> None:
    keys: dict[str, Any] = {name: key for name, key in stranger_keys().items() if name != left_out}
    for address in (tcp_server.address, "ipc:///tmp/x.sock"):
        with pytest.raises(InvalidValueError, match=f"missing: {left_out.replace('_', '.*')}"):
            ResidentClient(address, **keys)


def test_a_client_of_tcp_needs_keys_that_are_keys(tcp_server: WireServer) -> None:
    with pytest.raises(InvalidValueError, match="CURVE takes three keys"):
        ResidentClient(tcp_server.address)
    with pytest.raises(InvalidValueError, match="client's secret key: not a CURVE key") as caught:
        ResidentClient(tcp_server.address, **{**stranger_keys(), "client_secret_key": "secret"})  # type: ignore[arg-type]
    assert "'secret'" not in str(caught.value)


def test_a_client_with_an_unknown_key_gets_nothing(tcp_server: WireServer) -> None:
    keys: dict[str, Any] = stranger_keys()
    client = ResidentClient(tcp_server.address, timeout_s=0.5, resend_s=0.1, **keys)
    with client, pytest.raises(RequestTimeoutError, match="key"):
        client.status()
    assert not tcp_server.has_pending


def test_a_wrong_server_key_gets_nothing(tcp_server: WireServer) -> None:
    client = ResidentClient(
        tcp_server.address,
        timeout_s=0.5,
        server_public_key=CLIENT_PUBLIC,
        client_public_key=CLIENT_PUBLIC,
        client_secret_key=CLIENT_SECRET,
    )
    with client, pytest.raises(RequestTimeoutError):
        client.status()
    assert not tcp_server.has_pending
