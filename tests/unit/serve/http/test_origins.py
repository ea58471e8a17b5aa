"""Which Host and Origin a server without a key answers."""

from __future__ import annotations

import socket

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.http.origins import OriginPolicy, checked_origin, is_loopback

LOCAL = (b"host", b"127.0.0.1:30000")


def test_name_that_resolves_to_nothing_is_not_loopback() -> None:
    assert not is_loopback("no-such-host.invalid") and is_loopback("localhost") and not is_loopback("0.0.0.0")


@pytest.mark.parametrize("host", [b"localhost:1", b"127.0.0.1", b"[::1]:1", b"127.8.8.8:1", b"LOCALHOST"])
def test_loopback_names_are_answered(host: bytes) -> None:
    assert OriginPolicy("127.0.0.1").problem([(b"host", host)]) is None


@pytest.mark.parametrize(
    "host", [b"evil.example", b"192.0.2.7", b"localhost.evil.example", b"127.0.0.1.evil.example", b"", b"\xff"]
)
def test_other_names_are_not(host: bytes) -> None:
    problem = OriginPolicy("127.0.0.1").problem([(b"host", host)])
    assert problem is not None and problem.startswith("Host")


def test_beyond_loopback_addresses_and_the_machines_own_name_are_answered_but_no_name_that_could_be_rebound() -> None:
    policy = OriginPolicy("0.0.0.0")
    for host in (b"192.0.2.7:30000", b"[2001:db8::1]:30000", b"localhost:30000", socket.gethostname().encode()):
        assert policy.problem([(b"host", host)]) is None, host
    assert policy.problem([(b"host", b"evil.example")]) is not None
    assert OriginPolicy("models.example").problem([(b"host", b"models.example:30000")]) is None


@pytest.mark.parametrize(
    "origin", [b"https://127.0.0.1:30000", b"http://127.0.0.1", b"http://localhost:30000", b"null", b"", b"\xff"]
)
def test_origin_must_be_the_server_itself(origin: bytes) -> None:
    policy = OriginPolicy("127.0.0.1")
    assert policy.problem([LOCAL, (b"origin", b"http://127.0.0.1:30000")]) is None
    assert policy.problem([LOCAL, (b"origin", origin)]) is not None


def test_second_header_is_no_second_guess() -> None:
    policy = OriginPolicy("127.0.0.1")
    assert policy.problem([LOCAL, (b"host", b"evil.example")]) is not None
    assert (
        policy.problem([LOCAL, (b"origin", b"http://127.0.0.1:30000"), (b"origin", b"http://evil.example")]) is not None
    )


@pytest.mark.parametrize(
    ("site", "answered"), [(b"none", True), (b"same-origin", True), (b"same-site", False), (b"cross-site", False)]
)
def test_requests_without_origin_are_told_by_where_the_browser_says_they_come_from(site: bytes, answered: bool) -> None:
    assert (OriginPolicy("127.0.0.1").problem([LOCAL, (b"sec-fetch-site", site)]) is None) is answered


@pytest.mark.parametrize(
    "origin", ["*", "example.org", "http://example.org/", "http://a@b", "HTTP://a", "http://", "ftp://a", "http://a:x"]
)
def test_what_no_browser_sends_as_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(InvalidValueError, match="--cors-origin"):
        checked_origin(origin)
    assert checked_origin("http://localhost:3000") == "http://localhost:3000"


def test_pages_that_the_server_served_over_tls_are_its_own() -> None:
    policy = OriginPolicy("127.0.0.1")
    own = [LOCAL, (b"origin", b"https://127.0.0.1:30000")]
    assert policy.problem(own, "https") is None
    assert policy.problem([LOCAL, (b"origin", b"http://127.0.0.1:30000")], "https") is not None
    assert policy.problem([LOCAL, (b"origin", b"https://evil.example")], "https") is not None
