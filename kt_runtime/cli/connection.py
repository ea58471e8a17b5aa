"""The connection of commands to a server: at `--url`, else KT_RUNTIME_URL, else the default port on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click
import httpx

from kt_runtime import errors
from kt_runtime.errors import InvalidValueError, RuntimeFault, ServerUnreachableError, UserError
from kt_runtime.wire import ResidentClient

URL_VARIABLE = "KT_RUNTIME_URL"
KEY_VARIABLE = "KT_RUNTIME_API_KEY"
DEFAULT_URL = "http://127.0.0.1:30000"
LOOPBACK = {"127.0.0.1", "localhost", "::1"}

_F = TypeVar("_F", bound=Callable[..., Any])


def server_options(function: _F) -> _F:
    """Adds --url and --api-key to a command."""
    function = click.option("--api-key", envvar=KEY_VARIABLE, help=f"The server's key. [env: {KEY_VARIABLE}]")(function)
    return click.option("--url", help=f"The server. [env: {URL_VARIABLE}; default: {DEFAULT_URL}]")(function)


def server_url(option: str | None) -> str:
    """The server's base URL without trailing slash. Raises InvalidValueError unless it is http(s)://HOST[:PORT]."""
    url = option or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidValueError(f"server URL {url!r}: must look like {DEFAULT_URL} (--url, {URL_VARIABLE})")
    return url.rstrip("/")


def resident_client(api: ServerAPI, timeout_s: float = 600.0) -> ResidentClient:
    """A training client for a server on this machine, at the resident's address from the server's status."""
    if not _is_of_this_machine(urlsplit(api.url).hostname or ""):
        raise InvalidValueError(
            f"server URL {api.url}: training talks to the server through a socket file, so it runs on that machine; "
            f"use {DEFAULT_URL} there"
        )
    return ResidentClient(api.get("/kt/status")["wire_address"], timeout_s=timeout_s)


def _is_of_this_machine(host: str) -> bool:
    """Whether the host is a loopback name, or an address of this machine: only such a one can be bound."""
    if host in LOOPBACK:
        return True
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as opened:
            opened.bind(address)
    except OSError:
        return False
    return True


TIMEOUT_SECONDS = 120.0
LOAD_SECONDS = 3700.0
"""Longest wait for an adapter to be served. The server itself gives up after an hour."""


class ServerAPI:
    """JSON requests to the server's HTTP routes. An error answer is raised as the exception of its kind."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = TIMEOUT_SECONDS) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url
        # The authorities' certificates, which take 24 ms to read, are for https:// alone.
        is_encrypted = not url.startswith("http:")
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout_s, trust_env=False, verify=is_encrypted
        )

    def get(self, path: str) -> Any:
        return self._request("GET", path)

    def post(self, path: str, body: Any, timeout_s: float | None = None) -> Any:
        """`timeout_s`: of this request, another than the others'."""
        return self._request("POST", path, body, timeout_s)

    def patch(self, path: str, body: Any) -> Any:
        return self._request("PATCH", path, body)

    def delete(self, path: str) -> Any:
        return self._request("DELETE", path)

    def answers(self) -> bool:
        """Whether any server answers at the URL."""
        try:
            self._http.get("/health", timeout=5.0)
        except httpx.TransportError:
            return False
        return True

    def is_ready(self) -> bool:
        """Whether the server accepts requests: the model is loaded and has computed its first tokens."""
        try:
            return self._http.get("/ready", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def _request(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        timeout = self._http.timeout if timeout_s is None else httpx.Timeout(timeout_s)
        try:
            answer = self._http.request(method, path, json=body, timeout=timeout)
        except httpx.TimeoutException:
            raise errors.RequestTimeoutError(f"{self.url}{path}: no answer in time") from None
        except httpx.TransportError as error:
            raise ServerUnreachableError(
                f"no server at {self.url} ({error}); start one with `kt-runtime serve`, or name it by --url"
            ) from None
        if answer.is_success:
            return answer.json()
        raise _error_of(answer)


def running_status(option: str | None, api_key: str | None) -> dict[str, Any] | None:
    """GET /kt/status of the server at `server_url(option)`; None if no server answers."""
    api = ServerAPI(server_url(option), api_key)
    status: dict[str, Any] | None = api.get("/kt/status") if api.answers() else None
    return status


def _error_of(answer: httpx.Response) -> Exception:
    try:
        details = answer.json()["error"]
        kind, message = details["kind"], details["message"]
    except (ValueError, KeyError, TypeError):
        kind, message = "", f"{answer.request.url}: HTTP {answer.status_code}: {answer.text[:300]}"
    known = getattr(errors, str(kind), None)
    if isinstance(known, type) and issubclass(known, errors.KtError) and known is not errors.UnknownNameError:
        return known(message)
    return UserError(message) if answer.is_client_error else RuntimeFault(message)
