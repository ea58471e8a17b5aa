"""Enforces the route table: by the API key and by clients' keys with their limits, or for a server without a key by
each request's `Host` and `Origin`.

SGLang's own key middleware is not used: it ignores websockets, and it needs the key in SGLang's arguments, which are
logged. SGLang's CORS middleware is not used: it answers every origin with credentials.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.http.client_keys import Client, ClientKey, ClientRequest, Refused
from kt_runtime.serve.http.origins import OriginPolicy
from kt_runtime.serve.http.route_table import Access, Rule, methods_of, rule_for
from kt_runtime.serve.requests.checks.middleware import App, Receive, Scope, Send, route_path
from kt_runtime.sglang_patch.frontend.overload import client_request

logger = logging.getLogger(__name__)

TINKER_PREFIX = b"tml-"
KINDS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFoundError", 405: "MethodNotAllowed", 429: "RateLimited"}


class ApiKey:
    """Holds only the key's digest, so that no log or dump of this process's objects shows the key."""

    MIN_CHARACTERS = 8

    def __init__(self, key: str) -> None:
        """Raises InvalidValueError; the message does not quote the key."""
        if len(key) < self.MIN_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidValueError(
                f"the API key has {len(key)} characters; it must have at least {self.MIN_CHARACTERS}, all printable "
                "ASCII without spaces"
            )
        self.digest = hashlib.sha256(key.encode()).digest()

    def matches(self, offered: bytes) -> bool:
        """Compares digests of equal length in constant time."""
        return any(hmac.compare_digest(digest, self.digest) for digest in digests_of(offered))


def digests_of(offered: bytes) -> list[bytes]:
    """Digests of a credential, with and without "tml-" before the key: Tinker's SDK sends no key without it."""
    rest = offered.removeprefix(TINKER_PREFIX)
    return [hashlib.sha256(one).digest() for one in ([offered] if rest == offered else [offered, rest])]


@dataclass(frozen=True)
class Denial:
    """`retry_after_s`: with status 429."""

    status: int
    message: str
    retry_after_s: int | None = None


class AccessPolicy:
    """`host`: the address that the server binds to. `origins`: other sites whose pages may call the server. `own_key`:
    a second key, which this server has made for its own trainers; without `key` it has no use. `clients`: keys that may
    not change the server, with limits; without `key` there are none."""

    def __init__(
        self,
        host: str,
        key: ApiKey | None,
        origins: Collection[str] = (),
        *,
        own_key: ApiKey | None = None,
        clients: Sequence[ClientKey] = (),
    ) -> None:
        self.key, self.own_key, self.origins = key, own_key, OriginPolicy(host, origins)
        self._clients = clients

    def decide(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], scheme: str = "http"
    ) -> Denial | None:
        """The denial, or None for an allowed request. `headers`: lower-case names, as in ASGI. `scheme`: "http" or
        "https"."""
        rule = rule_for(method, path)
        headers = list(headers)
        is_question = self._is_question(method, headers)
        if self.key is None:
            denial = self._check_origin(headers, scheme)
        elif is_question or (rule is not None and rule.access is Access.PROBE):
            denial = None
        else:
            denial = self._check_key(headers)
        if denial is not None or is_question:
            return denial
        return self._check_rule(rule, method, path) or self._check_client(rule, path, headers)

    def client_of(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Client | None:
        """Whose limits count for an allowed request. None for the server's own keys, and for probes."""
        rule = rule_for(method, path)
        if self.key is None or not self._clients or rule is None or rule.access is Access.PROBE:
            return None
        clients = (self._client(token) for token in _credentials(headers))
        return next((client for client in clients if client is not None), None)

    def _client(self, offered: bytes) -> Client | None:
        digests = digests_of(offered)
        found = [each.client for each in self._clients if any(map(each.has, digests))]
        return found[0] if found else None

    def _check_client(self, rule: Rule | None, path: str, headers: list[tuple[bytes, bytes]]) -> Denial | None:
        if rule is None or rule.access is not Access.GUARDED or not self._clients:
            return None
        if all(self._client(token) is None for token in _credentials(headers)):
            return None
        return Denial(403, f"{path[:200]} changes the server, which only the server's own key may do")

    def _is_question(self, method: str, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether this is a CORS preflight from a page of `--cors-origin`. A preflight carries no key, and the CORS
        middleware answers it. Other OPTIONS requests get no exemption: the metrics route answers every method."""
        names = [name for name, _ in headers]
        return (
            method == "OPTIONS"
            and b"access-control-request-method" in names
            and any(name == b"origin" and self.origins.allows(value) for name, value in headers)
        )

    def _check_rule(self, rule: Rule | None, method: str, path: str) -> Denial | None:
        if rule is None:
            methods = methods_of(path)
            if methods:
                return Denial(405, f"{path} takes {', '.join(sorted(methods))}, not {method}")
            return Denial(404, f"{path[:200]} is no route of this server; docs/http.md lists them")
        if rule.access is Access.REFUSED:
            return Denial(403, f"{path} is not available under kt-runtime: {rule.reason}")
        if rule.access is Access.GUARDED and self.key is None and not self.origins.is_local:
            return Denial(
                403,
                f"{path} changes the server, which listens beyond this machine without an API key; start it with "
                "KT_RUNTIME_API_KEY set, or with --host 127.0.0.1",
            )
        return None

    def _check_key(self, headers: list[tuple[bytes, bytes]]) -> Denial | None:
        """Every credential in the request must be the key, so that several credentials are not several guesses."""
        assert self.key is not None
        offered = _credentials(headers)
        keys = [key for key in (self.key, self.own_key) if key is not None]
        matched = [any(key.matches(token) for key in keys) or self._client(token) is not None for token in offered]
        if matched and all(matched):
            return None
        problem = "the API key is not this server's" if offered else "this server needs an API key"
        return Denial(401, f"{problem}; send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`")

    def _check_origin(self, headers: list[tuple[bytes, bytes]], scheme: str) -> Denial | None:
        foreign = self.origins.problem(headers, scheme)
        if foreign is None:
            return None
        return Denial(
            403,
            f"a server without an API key answers programs of its machine and pages that it served itself, not "
            f"{foreign}; start it with KT_RUNTIME_API_KEY set, or name the site with --cors-origin",
        )


def _credentials(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    headers = list(headers)
    offered = [value for name, value in headers if name == b"x-api-key"]
    for value in (value for name, value in headers if name == b"authorization"):
        scheme, _, token = value.partition(b" ")
        offered.append(token if scheme.lower() == b"bearer" else b"")
    return offered


class AccessMiddleware:
    """Applies the policy to HTTP requests and websockets before any other middleware."""

    def __init__(self, app: App, policy: AccessPolicy) -> None:
        self.app, self.policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        method = scope["method"] if scope["type"] == "http" else "WEBSOCKET"
        path = route_path(scope)
        scheme = "https" if scope.get("scheme") in ("https", "wss") else "http"
        denial = self.policy.decide(method, path, scope["headers"], scheme)
        if denial is None:
            client = self.policy.client_of(method, path, scope["headers"])
            begun = None if client is None else client.begin()
            if not isinstance(begun, Refused):
                await self._pass_on(begun, scope, receive, send)
                return
            denial = Denial(429, begun.message, begun.retry_after_s)
        logger.warning("%s %r: denied with status %d", method, path, denial.status)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": denial.message[:120]})
        else:
            await _send_denial(denial, send, self._readable_by(scope["headers"]))

    async def _pass_on(self, begun: ClientRequest | None, scope: Scope, receive: Receive, send: Send) -> None:
        token = client_request.set(begun)
        try:
            await self.app(scope, receive, send)
        finally:
            client_request.reset(token)
            if begun is not None:
                begun.end()

    def _readable_by(self, headers: list[tuple[bytes, bytes]]) -> bytes | None:
        """The allowed origin that may read a denial, or None. Denials do not pass through the CORS middleware."""
        origins = [value for name, value in headers if name == b"origin"]
        return next((origin for origin in origins if self.policy.origins.allows(origin)), None)


async def _send_denial(denial: Denial, send: Send, origin: bytes | None) -> None:
    kind = KINDS[denial.status]
    body = json.dumps({"error": {"message": denial.message, "kind": kind}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if denial.retry_after_s is not None:
        headers.append((b"retry-after", str(denial.retry_after_s).encode()))
    if denial.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if origin is not None:
        headers += [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
    await send({"type": "http.response.start", "status": denial.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
