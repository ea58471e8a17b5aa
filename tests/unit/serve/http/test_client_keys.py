"""Keys of clients: what the file may hold, what a client may ask for, and its limits; time is in the test's hand."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError, NotFoundError
from kt_runtime.serve.http.auth import AccessMiddleware, AccessPolicy, ApiKey
from kt_runtime.serve.http.client_keys import Client, ClientKey, ClientRequest, Limits, Refused, read_client_keys
from kt_runtime.serve.http.front_door import client_keys
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.sglang_patch.frontend.overload import OverLimit, client_request

SERVERS, TEAM, GUEST = "the-servers-own-key", "the-key-of-team-a", "the-key-of-guests"
TEXT = f"""
[team-a]
key = "{TEAM}"
requests_at_once = 2
[guests]
key = "{GUEST}"
requests_per_minute = 30
tokens_at_once = 4096
tokens_per_minute = 20000
"""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def digest(text: str) -> bytes:
    return ApiKey(text).digest


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "keys.toml").write_text(TEXT)
    return tmp_path / "keys.toml"


@pytest.fixture
def policy(path: Path) -> AccessPolicy:
    return AccessPolicy("0.0.0.0", ApiKey(SERVERS), clients=read_client_keys(path, digest))


def status_of(policy: AccessPolicy, method: str, route: str, headers: list[tuple[bytes, bytes]]) -> int:
    denial = policy.decide(method, route, headers)
    return 200 if denial is None else denial.status


def test_a_client_asks_and_reads_and_only_the_server_s_key_changes(policy: AccessPolicy) -> None:
    for key in (TEAM, GUEST, SERVERS, f"tml-{TEAM}"):
        assert status_of(policy, "POST", "/generate", bearer(key)) == 200
        assert status_of(policy, "GET", "/kt/status", bearer(key)) == 200
        assert status_of(policy, "POST", "/kt/adapters", bearer(key)) == (200 if key == SERVERS else 403)
    assert status_of(policy, "POST", "/generate", bearer(TEAM + "x")) == 401
    assert status_of(policy, "POST", "/generate", [*bearer(TEAM), (b"x-api-key", b"wrong-key")]) == 401
    assert status_of(policy, "POST", "/kt/adapters", [*bearer(SERVERS), (b"x-api-key", TEAM.encode())]) == 403


def test_limits_are_the_client_s_and_probes_count_for_nobody(policy: AccessPolicy) -> None:
    def client(key: str, route: str = "/generate", method: str = "POST") -> str | None:
        found = policy.client_of(method, route, bearer(key))
        return None if found is None else found.name

    assert [client(key) for key in (TEAM, GUEST, f"tml-{GUEST}", SERVERS)] == ["team-a", "guests", "guests", None]
    assert client(TEAM, "/health", "GET") is None


def begun(client: Client) -> ClientRequest:
    request = client.begin()
    assert isinstance(request, ClientRequest)
    return request


def refused(client: Client) -> Refused:
    request = client.begin()
    assert isinstance(request, Refused)
    return request


def test_requests_at_once_are_counted_until_they_end() -> None:
    client = Client("a", Limits(requests_at_once=2))
    first, _ = begun(client), begun(client)
    assert refused(client) == Refused("2 requests of the client 'a' are under way, which is its limit", 1)
    first.end()
    begun(client)


def test_requests_per_minute_come_back_with_monotonic_time() -> None:
    clock = Clock()
    client = Client("a", Limits(requests_per_minute=30), clock=clock)
    for _ in range(30):
        begun(client)
    assert refused(client) == Refused("the client 'a' may send 30 requests a minute", 2)
    clock.now += 1.9
    refused(client)
    clock.now += 0.2
    begun(client)
    refused(client)
    clock.now += 3600
    assert [isinstance(client.begin(), ClientRequest) for _ in range(31)] == [True] * 30 + [False]


def test_tokens_at_once_are_the_prompts_and_what_answers_may_have_until_they_end() -> None:
    client = Client("a", Limits(tokens_at_once=100))
    first, second = begun(client), begun(client)
    first.take(10, 50)
    with pytest.raises(OverLimit, match=r"5 tokens and up to 36 new ones are 41, beside 60 .*may have 100 tokens"):
        second.take(5, 36)
    second.take(4, 36)
    with pytest.raises(InvalidValueError, match=r"10 tokens and up to 51 new ones are 61; a request .* may have 100"):
        second.take(10, 51)  # with what it has already: no wait would help
    first.end()
    begun(client).take(10, 50)


def test_tokens_per_minute_are_those_of_prompts_and_of_answers_as_they_come() -> None:
    clock = Clock()
    client = Client("a", Limits(tokens_per_minute=60), clock=clock)
    request = begun(client)
    request.take(20, 1000)
    for so_far in (1, 10, 10):
        request.answered("one", so_far)
    request.answered("another", 29)
    begun(client)  # one token is left
    request.answered("one", 21)
    assert refused(client) == Refused("the client 'a' may use 60 tokens a minute, and has used them", 11)
    clock.now += 11
    begun(client)
    request.end()
    request.answered("one", 41)  # the engine was further than the client, which has gone
    assert refused(client).retry_after_s == 20


def test_a_refused_request_reaches_nobody_says_when_to_come_back_and_a_failed_one_ends(
    policy: AccessPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[dict[str, Any]] = []
    waiting, reached = asyncio.Event(), 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal reached
        reached += 1
        assert isinstance(client_request.get(), ClientRequest)
        await waiting.wait()
        raise ConnectionError("the client has gone")

    async def run() -> None:
        middleware = AccessMiddleware(app, policy)
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": bearer(TEAM)}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        two = [asyncio.ensure_future(middleware(scope, receive, send)) for _ in range(2)]
        await asyncio.sleep(0)
        await middleware(scope, receive, send)
        waiting.set()
        await asyncio.gather(*two, return_exceptions=True)
        with pytest.raises(ConnectionError):
            await middleware(scope, receive, send)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert reached == 3
    start = sent[0]
    assert start["status"] == 429 and (b"retry-after", b"1") in start["headers"]
    assert b"'team-a'" in sent[1]["body"] and b"RateLimited" in sent[1]["body"]
    assert "denied with status 429" in caplog.text and TEAM not in caplog.text


BROKEN = {
    "no client": ("", "names no client"),
    "no TOML": ("[team", "keys.toml: "),
    "no table": ("a = 1", r"\[a\]: expected a table with 'key'"),
    "no key": ("[a]\nrequests_at_once = 1", r"\[a\]: 'key' is missing or no text"),
    "a short key": ('[a]\nkey = "short"', r"\[a\]: the API key has 5 characters"),
    "an unknown field": (
        f'[a]\nkey = "{TEAM}"\nrequest_at_once = 1',
        "unknown field 'request_at_once'.*s_at_once",
    ),
    "zero": (f'[a]\nkey = "{TEAM}"\nrequests_at_once = 0', "requests_at_once is 0; allowed are 1 to 1000000000"),
    "a flag": (f'[a]\nkey = "{TEAM}"\nrequests_per_minute = true', "requests_per_minute is True; allowed"),
    "tokens as text": (f'[a]\nkey = "{TEAM}"\ntokens_at_once = "9"', "tokens_at_once is '9'; allowed"),
    "a name": (f'["a b"]\nkey = "{TEAM}"', r"\[a b\]: a client's name has 1 to 64 letters"),
    "one key twice": (f'[a]\nkey = "{TEAM}"\n[b]\nkey = "{TEAM}"', "'b' has the key of 'a'"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=list(BROKEN))
def test_a_file_that_is_wrong_is_refused_without_showing_a_key(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(content)
    with pytest.raises(InvalidValueError, match=message) as raised:
        read_client_keys(path, digest)
    assert str(path) in str(raised.value) and TEAM not in str(raised.value)


def test_clients_need_a_server_with_a_key_that_is_not_theirs(path: Path, tmp_path: Path) -> None:
    options = ServeOptions(model="m", client_keys=path)
    with pytest.raises(InvalidValueError, match=r"without a key of its own.*KT_RUNTIME_API_KEY"):
        client_keys(options, None)
    with pytest.raises(InvalidValueError, match=r"\[team-a\] has the server's own key"):
        client_keys(options, ApiKey(TEAM))
    found = client_keys(options, ApiKey(SERVERS))
    assert [each.client.limits for each in found] == [Limits(2), Limits(None, 30, 4096, 20000)]
    assert [each.client.name for each in found] == ["team-a", "guests"] and isinstance(found[0], ClientKey)
    assert client_keys(ServeOptions(model="m"), None) == []
    with pytest.raises(NotFoundError, match="no such file"):
        client_keys(ServeOptions(model="m", client_keys=tmp_path / "none"), ApiKey(SERVERS))
