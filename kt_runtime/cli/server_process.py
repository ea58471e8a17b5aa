"""Starts `kt-runtime serve` in a separate process for a command that needs a server, and ends it afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.interrupts import uninterrupted
from kt_runtime.errors import KtError, RuntimeFault

START_SECONDS = 3600.0  # loading may read terabytes
STOP_SECONDS = 30.0
PORTS = range(10_000, 22_000)  # below SGLang's own, and below those that Linux gives to outgoing connections


def free_port() -> int:
    """A TCP port of 127.0.0.1 where nothing listens now, for a server that listens there some seconds later.

    Not one of those that the kernel draws for outgoing connections (ip(7), ip_local_port_range): until the server
    listens, a connection of any program could take it.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as opened, contextlib.suppress(OSError):
            opened.bind(("127.0.0.1", port))
            return port
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


@contextlib.contextmanager
def server(model: str, arguments: list[str], log_path: Path, *, api_key: str | None = None) -> Iterator[ServerAPI]:
    """Runs a server on a free port inside the `with` block. Raises RuntimeFault with the log's end if the start fails.

    The server has ended after the block, also where a signal ends the block. `arguments`: further options of
    `kt-runtime serve`. `log_path`: gets the server's output.
    """
    port = free_port()
    command = [sys.executable, "-P", "-m", "kt_runtime.cli.main", "serve", "--model", model, "--port", str(port)]
    api = ServerAPI(f"http://127.0.0.1:{port}", api_key)
    with _running(lambda: _start([*command, "--verbose", *arguments], log_path), lambda: _has_restored(api), log_path):
        yield api


@contextlib.contextmanager
def other_server(command: list[str], port: int, environment: Mapping[str, str], log_path: Path) -> Iterator[ServerAPI]:
    """As `server`, for another program: ready when GET /ready at `port` is 200. `environment`: all of its variables."""
    api = ServerAPI(f"http://127.0.0.1:{port}")
    with _running(lambda: _start_with(command, log_path, environment), api.is_ready, log_path):
        yield api


@contextlib.contextmanager
def _running(
    start: Callable[[], subprocess.Popen[bytes]], is_ready: Callable[[], bool], log_path: Path
) -> Iterator[None]:
    """The process is ready in the block, and has ended after it."""
    with uninterrupted() as acting:
        process = start()
        try:
            with acting():
                _wait_ready(process, is_ready, log_path)
                yield
        finally:
            _stop(process)


def _has_restored(api: ServerAPI) -> bool:
    """Whether kt-runtime's server accepts requests and serves the adapters of an earlier run."""
    if api.is_ready():
        with contextlib.suppress(KtError):
            return not api.get("/kt/status")["restoring"]
    return False


def _start(command: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    return _start_with(command, log_path, {**os.environ, "PYTHONSAFEPATH": "1"})


def _start_with(command: list[str], log_path: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    """Runs in the server's process: the kernel sends it SIGTERM when the parent dies, however it dies (prctl(2))."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _wait_ready(process: subprocess.Popen[bytes], is_ready: Callable[[], bool], log_path: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            end = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeFault(
                f"the server ended with status {process.returncode} while starting; {log_path} ends:\n{end}"
            )
        if is_ready():
            return
        time.sleep(0.25)
    raise RuntimeFault(f"the server did not answer within {START_SECONDS:.0f} s; see {log_path}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process with SIGTERM; after at most STOP_SECONDS kills the whole process group with SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
