"""The middleware between the network and SGLang's routes: access, CORS, and checks of request bodies.

From the outside in: `AccessMiddleware` (keys, Host and Origin), CORS for the sites of `--cors-origin`,
`SharedHealth`, `RequestMiddleware` (bodies). SGLang's own CORS middleware is removed, since it answers every origin
with credentials.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.http.auth import AccessMiddleware, AccessPolicy, ApiKey
from kt_runtime.serve.http.client_keys import ClientKey, read_client_keys
from kt_runtime.serve.http.health import SharedHealth
from kt_runtime.serve.http.origins import is_loopback
from kt_runtime.serve.http.route_table import rule_for
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.serve.requests.checks.body_reader import largest_body_bytes
from kt_runtime.serve.requests.checks.middleware import RequestMiddleware
from kt_runtime.serve.requests.checks.prompts import check_prompts
from kt_runtime.serve.requests.checks.served import KnownParsers, ResponsesThere, ServedModels
from kt_runtime.serve.requests.checks.tools import check_tools
from kt_runtime.serve.requests.checks.volume import VolumeLimit

if TYPE_CHECKING:
    from fastapi import FastAPI


class FrontDoor:
    """`context_tokens`: the longest sequence; it determines the body limit. `own_key`: of the server's trainers.

    `stalled()`: why the engine can't answer; empty while it works. `catching_up()`: whether adapters of the registry
    are still on their way.
    """

    def __init__(
        self,
        options: ServeOptions,
        model_name: str,
        key: ApiKey | None,
        context_tokens: int,
        own_key: ApiKey | None = None,
    ) -> None:
        clients = client_keys(options, key)
        self.policy = AccessPolicy(options.host, key, options.cors_origins, own_key=own_key, clients=clients)
        self.models = ServedModels(model_name, any_name=options.any_model_name)
        self._context_tokens, self._longest_tokens = context_tokens, options.max_total_tokens
        self.stalled: Callable[[], str] = lambda: ""
        self.catching_up: Callable[[], bool] = lambda: False
        self.max_body_bytes = options.max_body_bytes or largest_body_bytes(context_tokens)

    def serves(self, adapters: Callable[[], Collection[str]]) -> None:
        """From now on requests may use the adapters whose names `adapters` returns."""
        self.models.adapters = adapters

    def prepare(self, app: FastAPI) -> None:
        """Adds the middleware, the innermost first."""
        from fastapi.exceptions import RequestValidationError
        from fastapi.middleware.cors import CORSMiddleware

        from kt_runtime.serve.requests.checks.validation_errors import answer_validation_error
        from kt_runtime.sglang_patch.frontend.http_server import has_responses, parser_names

        app.user_middleware[:] = [one for one in app.user_middleware if one.cls is not CORSMiddleware]
        app.add_exception_handler(RequestValidationError, answer_validation_error)
        parsers = KnownParsers(*parser_names())
        volume = VolumeLimit(self._context_tokens, self._longest_tokens)
        responses = ResponsesThere(lambda: has_responses(app))
        checks = [check_prompts, check_tools, volume.check, self.models.check, parsers.check, responses.check]
        app.add_middleware(RequestMiddleware, fields_of=rule_for, max_body_bytes=self.max_body_bytes, checks=checks)
        app.add_middleware(SharedHealth, stalled=lambda: self.stalled(), catching_up=lambda: self.catching_up())
        if self.policy.origins.allowed:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=sorted(self.policy.origins.allowed),
                allow_methods=["GET", "POST", "PUT", "DELETE"],
                allow_headers=["Authorization", "Content-Type", "X-API-Key"],
            )
        app.add_middleware(AccessMiddleware, policy=self.policy)


def client_keys(options: ServeOptions, key: ApiKey | None) -> list[ClientKey]:
    """The keys of `--client-keys`. Raises as `read_client_keys`, and InvalidValueError without the server's own key."""
    if options.client_keys is not None and key is None:
        raise InvalidValueError(
            f"--client-keys {options.client_keys}: without a key of its own the server lets every program of this "
            "machine change it; set one (KT_RUNTIME_API_KEY=... in the environment)"
        )
    found = read_client_keys(options.client_keys, lambda text: ApiKey(text).digest)
    for each in found:
        if key is not None and each.has(key.digest):
            raise InvalidValueError(
                f"--client-keys {options.client_keys}: [{each.client.name}] has the server's own key, with no limits"
            )
    return found


def check_reach(options: ServeOptions) -> None:
    """Raises InvalidValueError for a server open to the whole network, unless the user asked for one."""
    if options.api_key is None and not options.allow_no_key and not is_loopback(options.host):
        raise InvalidValueError(
            f"--host {options.host!r}: the server would answer everyone who reaches this machine. Set a key "
            "(KT_RUNTIME_API_KEY=... in the environment), or listen at --host 127.0.0.1, or pass --allow-no-key"
        )
