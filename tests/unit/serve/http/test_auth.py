"""Who is answered, by key and by origin, on a plain ASGI app."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.http import auth
from kt_runtime.serve.http.auth import AccessMiddleware, AccessPolicy, ApiKey
from kt_runtime.serve.http.route_table import RULES, Access

KEY = "correct-horse-battery"
GUARDED = ("POST", "/kt/adapters")
LOCAL_HOST = (b"host", b"127.0.0.1:30000")


def bearer(key: str) -> tuple[bytes, bytes]:
    return (b"authorization", b"Bearer " + key.encode())


def status_of(policy: AccessPolicy, method: str, path: str, *headers: tuple[bytes, bytes]) -> int:
    denial = policy.decide(method, path, headers)
    return 200 if denial is None else denial.status


class TestWithKey:
    policy = AccessPolicy("0.0.0.0", ApiKey(KEY))

    def test_every_kind_of_route_but_probes_needs_the_key(self) -> None:
        for method, path in [("GET", "/kt/status"), ("POST", "/generate"), GUARDED]:
            assert status_of(self.policy, method, path) == 401, path
            assert status_of(self.policy, method, path, bearer(KEY)) == 200, path
        assert status_of(self.policy, "GET", "/health") == 200

    @pytest.mark.parametrize("path", ["/metrics", "/metrics/x", "/generate", "/no_such_route"])
    def test_no_method_goes_without_the_key(self, path: str) -> None:
        """SGLang's metrics are given to every method, and each path that it has no route for becomes a new metric."""
        question = [(b"origin", b"http://localhost:3000"), (b"access-control-request-method", b"GET")]
        for method in ("OPTIONS", "HEAD", "TRACE", "WEBSOCKET", "MADE-UP"):
            assert status_of(self.policy, method, path) == 401
            assert status_of(self.policy, method, path, *question) == 401
        assert status_of(self.policy, "OPTIONS", path, bearer(KEY)) in (404, 405)

    def test_probes_take_no_method_that_a_client_makes_up(self) -> None:
        assert status_of(self.policy, "HEAD", "/health") == 200
        assert status_of(self.policy, "MADE-UP", "/health") != 200

    @pytest.mark.parametrize(
        "wrong", ["", "wrong", KEY[:-1], KEY + "x", KEY.upper(), KEY[0], " " + KEY, KEY + "\x00", "é" * 8]
    )
    def test_anything_but_the_key_itself_is_refused(self, wrong: str) -> None:
        assert status_of(self.policy, "POST", "/generate", bearer(wrong)) == 401
        assert status_of(self.policy, "POST", "/generate", (b"x-api-key", wrong.encode())) == 401

    def test_key_is_taken_from_either_header_and_not_as_another_scheme(self) -> None:
        assert status_of(self.policy, "POST", "/generate", (b"x-api-key", KEY.encode())) == 200
        assert status_of(self.policy, "POST", "/generate", (b"authorization", b"bearer " + KEY.encode())) == 200
        assert status_of(self.policy, "POST", "/generate", (b"authorization", b"Basic " + KEY.encode())) == 401
        assert status_of(self.policy, "POST", "/generate", (b"authorization", KEY.encode())) == 401

    def test_the_prefix_of_tinkers_keys_is_ignored_once(self) -> None:
        assert status_of(self.policy, "POST", "/api/v1/asample", (b"x-api-key", b"tml-" + KEY.encode())) == 200
        assert status_of(self.policy, "POST", "/api/v1/asample", (b"x-api-key", b"tml-tml-" + KEY.encode())) == 401
        assert status_of(self.policy, "POST", "/api/v1/asample", (b"x-api-key", b"tml-")) == 401

    def test_the_servers_own_trainers_have_a_key_which_opens_no_server_without_keys(self) -> None:
        policy = AccessPolicy("0.0.0.0", ApiKey(KEY), own_key=ApiKey("the-key-of-trainers"))
        assert status_of(policy, "POST", "/generate", bearer("the-key-of-trainers")) == 200
        assert status_of(policy, "POST", "/generate", bearer(KEY)) == 200
        assert status_of(policy, "POST", "/generate", bearer("the-key-of-trainer")) == 401
        without = AccessPolicy("0.0.0.0", None, own_key=ApiKey("the-key-of-trainers"))
        assert status_of(without, *GUARDED, LOCAL_HOST, bearer("the-key-of-trainers")) == 403

    def test_second_credential_is_no_second_guess(self) -> None:
        assert status_of(self.policy, "POST", "/generate", bearer("wrong-key"), bearer(KEY)) == 401
        assert status_of(self.policy, "POST", "/generate", bearer(KEY), (b"x-api-key", b"wrong-key")) == 401

    def test_refused_routes_stay_refused_with_the_key(self) -> None:
        assert status_of(self.policy, "POST", "/update_weights_from_tensor") == 401
        denial = self.policy.decide("POST", "/update_weights_from_tensor", [bearer(KEY)])
        assert denial is not None and denial.status == 403 and "weights never change" in denial.message

    def test_route_without_a_rule_is_not_there(self) -> None:
        assert status_of(self.policy, "POST", "/new_route") == 401
        assert status_of(self.policy, "POST", "/new_route", bearer(KEY)) == 404
        assert status_of(self.policy, "GET", "/generate", bearer(KEY)) == 405
        denial = self.policy.decide("GET", "/generate", [bearer(KEY)])
        assert denial is not None and denial.message == "/generate takes POST, PUT, not GET"

    def test_key_of_another_length_is_compared_by_digest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compared: list[tuple[int, int]] = []

        def compare(a: bytes, b: bytes) -> bool:
            compared.append((len(a), len(b)))
            return False

        monkeypatch.setattr(auth.hmac, "compare_digest", compare)
        ApiKey(KEY).matches(b"a")
        assert compared == [(32, 32)]


class TestWithoutKey:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no-such-host.invalid", ""])
    def test_beyond_loopback_everything_guarded_is_denied(self, host: str) -> None:
        policy = AccessPolicy(host, None)
        for rule in RULES:
            if rule.access in (Access.GUARDED, Access.REFUSED):
                method = next(iter(rule.methods or {"POST"}))
                assert status_of(policy, method, rule.path, LOCAL_HOST) == 403, rule.path
        assert status_of(policy, "POST", "/generate") == status_of(policy, "GET", "/v1/models") == 200

    def test_denial_says_what_to_do(self) -> None:
        denial = AccessPolicy("0.0.0.0", None).decide(*GUARDED, [])
        assert denial is not None and "KT_RUNTIME_API_KEY" in denial.message and "127.0.0.1" in denial.message

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
    def test_on_loopback_this_machines_programs_may_change_the_server(self, host: str) -> None:
        policy = AccessPolicy(host, None)
        assert status_of(policy, *GUARDED, LOCAL_HOST) == 200
        assert status_of(policy, *GUARDED, (b"host", b"[::1]:30000"), (b"origin", b"http://[::1]:30000")) == 200
        assert status_of(policy, "POST", "/update_weights_from_disk", LOCAL_HOST) == 403

    @pytest.mark.parametrize(
        "foreign",
        [
            (b"origin", b"https://example.org"),
            (b"origin", b"http://localhost:3000"),
            (b"sec-fetch-site", b"cross-site"),
            (b"host", b"rebound.example.org"),
        ],
    )
    def test_foreign_pages_are_denied_every_route_and_method(self, foreign: tuple[bytes, bytes]) -> None:
        policy = AccessPolicy("127.0.0.1", None)
        headers = [foreign] if foreign[0] == b"host" else [LOCAL_HOST, foreign]
        for rule in RULES:
            for method in rule.methods or {"GET", "POST", "OPTIONS", "WEBSOCKET"}:
                assert status_of(policy, method, rule.path, *headers) == 403, rule.path

    def test_site_of_cors_origin_is_answered(self) -> None:
        policy = AccessPolicy("127.0.0.1", None, ["http://localhost:3000"])
        page = (b"origin", b"http://localhost:3000")
        question = (b"access-control-request-method", b"POST")
        assert status_of(policy, "OPTIONS", "/generate", LOCAL_HOST, page, question) == 200
        assert status_of(policy, "OPTIONS", "/generate", LOCAL_HOST, page) == 405
        assert status_of(policy, "POST", "/generate", LOCAL_HOST, page, (b"sec-fetch-site", b"same-site")) == 200
        assert status_of(policy, "POST", "/generate", LOCAL_HOST, (b"origin", b"http://localhost:3001")) == 403


@pytest.mark.parametrize(
    "key", ["", "short", "with space in it", "tab\tin-the-key", "nul\0in-the-key", "schlüssel-key"]
)
def test_unusable_key_is_refused_without_being_quoted(key: str) -> None:
    with pytest.raises(InvalidValueError) as raised:
        ApiKey(key)
    assert not key or key not in str(raised.value)


def test_key_object_does_not_hold_the_key() -> None:
    assert KEY not in repr(vars(ApiKey(KEY))) + repr(AccessPolicy("::1", ApiKey(KEY)))


def call(policy: AccessPolicy, scope: dict[str, Any]) -> list[Any]:
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send("passed")

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(AccessMiddleware(app, policy)(scope, None, send))  # type: ignore[arg-type]
    return sent


def test_denied_request_gets_json_and_never_reaches_the_app(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [bearer("guessed-the-key")]}
    start, body = call(AccessPolicy("127.0.0.1", ApiKey(KEY)), scope)
    assert start["status"] == 401 and (b"www-authenticate", b"Bearer") in start["headers"]
    assert json.loads(body["body"])["error"]["kind"] == "Unauthorized"
    assert KEY not in caplog.text and "guessed-the-key" not in caplog.text


def test_websockets_are_denied_too() -> None:
    policy = AccessPolicy("127.0.0.1", ApiKey(KEY))
    scope = {"type": "websocket", "path": "/new_socket", "headers": []}
    assert call(policy, scope)[0]["type"] == "websocket.close"
    assert call(policy, {**scope, "headers": [bearer(KEY)]})[0]["type"] == "websocket.close"  # no rule names it


def test_path_prefix_of_a_proxy_is_taken_off() -> None:
    scope = {"type": "http", "method": "GET", "path": "/llm/health", "root_path": "/llm", "headers": []}
    assert call(AccessPolicy("127.0.0.1", ApiKey(KEY)), scope) == ["passed"]


def test_lifespan_passes() -> None:
    assert call(AccessPolicy("127.0.0.1", ApiKey(KEY)), {"type": "lifespan"}) == ["passed"]


def test_denial_may_be_read_by_the_page_of_an_allowed_site() -> None:
    policy = AccessPolicy("127.0.0.1", ApiKey(KEY), ["https://chat.example.org"])
    scope = {"type": "http", "method": "POST", "path": "/generate"}
    for origin, expected in ((b"https://chat.example.org", [b"https://chat.example.org"]), (b"https://evil.org", [])):
        start, _ = call(policy, {**scope, "headers": [(b"origin", origin)]})
        assert [value for name, value in start["headers"] if name == b"access-control-allow-origin"] == expected


def test_own_pages_are_answered_over_tls_too() -> None:
    policy = AccessPolicy("127.0.0.1", None)
    headers = [(b"host", b"127.0.0.1:30000"), (b"origin", b"https://127.0.0.1:30000")]
    scope = {"type": "http", "method": "GET", "path": "/kt/status", "headers": headers}
    assert call(policy, {**scope, "scheme": "https"}) == ["passed"]
    assert call(policy, {**scope, "scheme": "http"})[0]["status"] == 403
