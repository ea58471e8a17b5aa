"""Who may call which route: one table over SGLang's routes and ours, and the ASGI middleware that enforces it.

    access     without a key, loopback   without a key, other address   with a key
    PROBE      answered                  answered                       answered
    READ       answered                  answered                       key
    GENERATE   answered                  answered                       key
    GUARDED    answered, local pages     403                            key
    REFUSED    403                       403                            key, then 403

A route that the table doesn't name is GUARDED: what a later SGLang adds is closed until someone has looked at it
(tests/serve/test_auth.py walks the route table). SGLang's own key middleware is not used: it leaves websockets out,
and it needs the key in SGLang's arguments, which are logged.

Without a key, GUARDED routes answer only requests whose `Host` and `Origin` are this machine's, so that a web page in
the user's browser can't call them (SGLang allows every origin).
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kt_runtime.errors import InvalidValueError

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FIXED_WEIGHTS = "the base model is being trained on in place; its weights never change while the server runs"
FIXED_PROCESSES = "kt-runtime runs one model on one rank; start another server instead"


class Access(enum.Enum):
    PROBE = "probe"
    READ = "read"
    GENERATE = "generate"
    GUARDED = "guarded"
    REFUSED = "refused"


@dataclass(frozen=True)
class Rule:
    """`path` may hold `{x}`, one segment, or `{x:path}`, the rest. `methods` None: all. `reason` is for REFUSED."""

    access: Access
    path: str
    methods: frozenset[str] | None = None
    reason: str = ""


def _rules(access: Access, paths: str, methods: str = "", reason: str = "") -> list[Rule]:
    return [Rule(access, path, frozenset(methods.split()) or None, reason) for path in paths.split()]


RULES: tuple[Rule, ...] = (
    *_rules(Access.PROBE, "/health /ready /ping"),
    *_rules(Access.READ, "/ /openapi.json /docs /docs/oauth2-redirect /redoc /metrics /metrics/", "GET HEAD"),
    *_rules(Access.READ, "/health_generate /get_model_info /model_info /get_server_info /server_info", "GET"),
    *_rules(Access.READ, "/list_external_corpora /get_hicache_l3_cache_layout /hicache/storage-backend", "GET"),
    *_rules(Access.READ, "/v1/models /v1/models/{model:path} /v1/responses/{response_id} /v1/loads", "GET"),
    *_rules(Access.READ, "/api/tags /is_scaling_elastic_ep /kt/status /kt/adapters /kt/adapters/{name}", "GET"),
    *_rules(Access.READ, "/api/show", "POST"),
    *_rules(Access.GENERATE, "/generate /encode /classify /v1/rerank", "POST PUT"),
    *_rules(Access.GENERATE, "/v1/completions /v1/chat/completions /v1/embeddings /v1/classify /v1/score", "POST"),
    *_rules(Access.GENERATE, "/tokenize /v1/tokenize /detokenize /v1/detokenize /v1/audio/transcriptions", "POST"),
    *_rules(Access.GENERATE, "/v1/decisions /v1/systemone /v1/responses /v1/messages", "POST"),
    *_rules(Access.GENERATE, "/v1/messages/count_tokens /api/chat /api/generate /invocations", "POST"),
    *_rules(Access.GENERATE, "/vertex_generate /parse_function_call /separate_reasoning", "POST"),
    *_rules(Access.GENERATE, "/v1/realtime", "WEBSOCKET"),
    *_rules(Access.GUARDED, "/kt/adapters /kt/adapters/{name}/rollback /kt/cache/clear", "POST"),
    *_rules(Access.GUARDED, "/kt/adapters/{name}", "DELETE"),
    *_rules(Access.GUARDED, "/load_lora_adapter /unload_lora_adapter /abort_request", "POST"),
    *_rules(Access.GUARDED, "/v1/responses/{response_id}/cancel /pause_generation /continue_generation", "POST"),
    *_rules(Access.GUARDED, "/open_session /close_session /flush_cache /freeze_gc /slow_down", "GET POST"),
    *_rules(Access.GUARDED, "/start_profile /stop_profile /set_trace_level /configure_logging", "GET POST"),
    *_rules(Access.GUARDED, "/start_expert_distribution_record /stop_expert_distribution_record", "GET POST"),
    *_rules(Access.GUARDED, "/dump_expert_distribution_record /get_weights_by_name", "GET POST"),
    *_rules(Access.GUARDED, "/add_external_corpus /remove_external_corpus", "POST"),
    *_rules(
        Access.REFUSED,
        "/update_weights_from_disk /update_weights_from_tensor /update_weights_from_distributed "
        "/update_weights_from_ipc /begin_weight_update /end_weight_update /update_weight_version "
        "/init_weights_update_group /destroy_weights_update_group /weights_checker "
        "/init_weights_send_group_for_remote_instance /send_weights_to_remote_instance "
        "/release_memory_occupation /resume_memory_occupation",
        reason=FIXED_WEIGHTS,
    ),
    *_rules(
        Access.REFUSED,
        "/load_lora_adapter_from_tensors",
        reason="it takes pickled tensors; save the adapter as a PEFT directory and POST its path to /kt/adapters",
    ),
    *_rules(
        Access.REFUSED,
        "/get_remote_instance_transfer_engine_info /remote_instance_transfer_engine_info /pd_role_switch "
        "/scale_elastic_ep",
        reason=FIXED_PROCESSES,
    ),
    *_rules(Access.REFUSED, "/set_internal_state", reason="the server's settings are fixed when it starts"),
    *_rules(Access.REFUSED, "/dumper/{method}", reason="it writes tensors to the server's disk"),
    *_rules(
        Access.REFUSED,
        "/hicache/storage-backend",
        "PUT DELETE",
        reason="it loads code by name; choose the cache when the server starts",
    ),
    *_rules(
        Access.REFUSED,
        "/hicache/storage-backend/clear",
        "POST",
        reason="pages would stay in memory and never be written again; POST /kt/cache/clear empties all tiers",
    ),
)


def _compile(path: str) -> re.Pattern[str]:
    parts = re.split(r"(\{[^}]*\})", path)
    text = "".join(
        re.escape(part) if not part.startswith("{") else (".*" if part.endswith(":path}") else "[^/]+")
        for part in parts
    )
    return re.compile(text, re.DOTALL)


_COMPILED = [(_compile(rule.path), rule) for rule in RULES]


def rule_for(method: str, path: str) -> Rule | None:
    """The table's rule, or None where it has none. A websocket's method is "WEBSOCKET"."""
    for pattern, rule in _COMPILED:
        if (rule.methods is None or method in rule.methods) and pattern.fullmatch(path):
            return rule
    return None


class ApiKey:
    """Holds the key's digest only, so that neither a log nor a dump of this process's objects shows the key."""

    MIN_CHARACTERS = 8

    def __init__(self, key: str) -> None:
        """Raises InvalidValueError, which does not quote the key."""
        if len(key) < self.MIN_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidValueError(
                f"the API key has {len(key)} characters; it must have at least {self.MIN_CHARACTERS}, all printable "
                "ASCII without spaces"
            )
        self._digest = hashlib.sha256(key.encode()).digest()

    def matches(self, offered: bytes) -> bool:
        """Takes the same time for every key that is offered: digests of equal length are compared."""
        return hmac.compare_digest(hashlib.sha256(offered).digest(), self._digest)


@dataclass(frozen=True)
class Denial:
    status: int
    message: str


class AccessPolicy:
    """`host` is the address that the server binds to."""

    def __init__(self, host: str, key: ApiKey | None) -> None:
        self.key, self.is_local = key, is_loopback(host)

    def decide(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Denial | None:
        """None lets the request pass. `headers` have lower-case names, as in ASGI."""
        rule = rule_for(method, path)
        access = rule.access if rule else Access.GUARDED
        if method == "OPTIONS" or access is Access.PROBE:  # OPTIONS: a browser's question, which carries no key
            return None
        headers = list(headers)
        if self.key is not None:
            denial = self._check_key(headers)
        else:
            denial = self._check_local(path, headers) if access in (Access.GUARDED, Access.REFUSED) else None
        if denial is None and rule is not None and access is Access.REFUSED:
            denial = Denial(403, f"{path} is not available under kt-runtime: {rule.reason}")
        return denial

    def _check_key(self, headers: list[tuple[bytes, bytes]]) -> Denial | None:
        """Every credential that a request carries must be the key; a second one is not a second guess."""
        assert self.key is not None
        offered = [value for name, value in headers if name == b"x-api-key"]
        for value in (value for name, value in headers if name == b"authorization"):
            scheme, _, token = value.partition(b" ")
            offered.append(token if scheme.lower() == b"bearer" else b"")
        matched = [self.key.matches(token) for token in offered]
        if matched and all(matched):
            return None
        problem = "the API key is not this server's" if offered else "this server needs an API key"
        return Denial(401, f"{problem}; send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`")

    def _check_local(self, path: str, headers: list[tuple[bytes, bytes]]) -> Denial | None:
        if not self.is_local:
            return Denial(
                403,
                f"{path} changes the server, which listens beyond this machine without an API key; start it with "
                "KT_RUNTIME_API_KEY set, or with --host 127.0.0.1",
            )
        hosts = [_name_of(b"http://" + value) for name, value in headers if name == b"host"]
        origins = [_name_of(value) for name, value in headers if name == b"origin"]
        for kind, name in [("Host", host) for host in hosts] + [("Origin", origin) for origin in origins]:
            if name is None or not _is_loopback_name(name):
                return Denial(
                    403,
                    f"{path} changes the server; without an API key it is answered only for programs and pages of "
                    f"this machine, not for {kind} {name or 'null'!r}. Start the server with KT_RUNTIME_API_KEY set",
                )
        return None


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host` is reached from this machine only. A name must resolve to loopback only."""
    if _is_loopback_name(host):
        return True
    try:
        ipaddress.ip_address(host.strip("[]"))
        return False
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def _is_loopback_name(name: str) -> bool:
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _name_of(url: bytes) -> str | None:
    try:
        return urlsplit(url.decode("ascii")).hostname
    except ValueError:
        return None


class AccessMiddleware:
    """Asks the policy before anything else sees the request; for websockets too."""

    def __init__(self, app: App, policy: AccessPolicy) -> None:
        self.app, self.policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        method = scope["method"] if scope["type"] == "http" else "WEBSOCKET"
        path = scope["path"].removeprefix(scope.get("root_path") or "") or "/"
        denial = self.policy.decide(method, path, scope["headers"])
        if denial is None:
            await self.app(scope, receive, send)
            return
        logger.warning("%s %r: denied with status %d", method, path, denial.status)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": denial.message[:120]})
        else:
            await _send_denial(denial, send)


async def _send_denial(denial: Denial, send: Send) -> None:
    kind = "Unauthorized" if denial.status == 401 else "Forbidden"
    body = json.dumps({"error": {"message": denial.message, "kind": kind}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if denial.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": denial.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
