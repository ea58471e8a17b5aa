"""Which servers a trainer may talk to: those of its machine, under any of its addresses. And for how long a command
waits for an answer."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from kt_runtime.cli.adapter.command import command as adapter
from kt_runtime.cli.connection import TIMEOUT_SECONDS, ServerAPI, resident_client
from kt_runtime.cli.train.temporary_adapter import adapter_in_use
from kt_runtime.errors import InvalidValueError, ServerUnreachableError
from kt_runtime.serve.http.adapters import LOAD_SECONDS


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.0.0.2", socket.gethostname()])
def test_an_address_of_this_machine_is_asked(host: str) -> None:
    with pytest.raises(ServerUnreachableError):  # nobody listens there
        resident_client(ServerAPI(f"http://{host}:9"))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_another_machine_is_refused_before_it_is_asked(host: str) -> None:
    with pytest.raises(InvalidValueError, match="so it runs on that machine"):
        resident_client(ServerAPI(f"http://{host}:9"))


@contextmanager
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, float]]]:
    """Of each request its method, path and patience in seconds; nobody answers, but for the list of adapters."""
    found: list[tuple[str, str, float]] = []

    def request(_client: httpx.Client, method: str, path: str, *, json: Any, timeout: httpx.Timeout) -> httpx.Response:
        assert timeout.read is not None
        found.append((method, path, timeout.read))
        if method == "GET":
            return httpx.Response(200, json={"adapters": []})
        raise httpx.ConnectError(f"nobody answers {json}")

    with monkeypatch.context() as patch:
        patch.setattr(httpx.Client, "request", request)
        yield found


def of_a_temporary_adapter(directory: Path) -> None:
    with adapter_in_use(ServerAPI("http://127.0.0.1:9"), None, directory, print):
        pass


def of_a_command(*words: str) -> Callable[[Path], None]:
    def run(directory: Path) -> None:
        result = CliRunner().invoke(
            adapter, [*(word.format(directory) for word in words), "--url", "http://127.0.0.1:9"]
        )
        if result.exception is not None:
            raise result.exception

    return run


@pytest.mark.parametrize(
    "serve",
    [of_a_command("load", "name", "{}"), of_a_command("rollback", "name"), of_a_temporary_adapter],
    ids=["load", "rollback", "temporary"],
)
def test_for_an_adapter_to_be_served_a_command_waits_longer_than_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, serve: Callable[[Path], None]
) -> None:
    with asked(monkeypatch) as requests, pytest.raises(ServerUnreachableError):
        serve(tmp_path)
    (waited,) = (seconds for method, _, seconds in requests if method == "POST")
    assert waited > LOAD_SECONDS
    assert all(seconds == TIMEOUT_SECONDS for method, _, seconds in requests if method != "POST")
