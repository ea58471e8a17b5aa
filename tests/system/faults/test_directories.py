"""A second server with one of a running server's directories ends before it loads anything, and the first goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from system import forked_server
from system.conftest import CachedServer, StartCachedServer

from kt_runtime.cli.server_process import free_port

PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def running(cached_server: StartCachedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedServer]:
    with cached_server("tiny-qwen3-moe", tmp_path_factory.mktemp("first")) as served:
        yield served


def second_server(place: Path, options: dict[str, str | Path]) -> subprocess.CompletedProcess[str]:
    """With a port of its own, and a runtime directory unless `options` names one."""
    (place / "runtime").mkdir(mode=0o700)
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return subprocess.run(
        [sys.executable, "-P", "-m", "kt_runtime.cli.main", "serve", "--port", str(free_port()), *arguments],
        env={**os.environ, "XDG_RUNTIME_DIR": str(place / "runtime"), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("shared", ["adapter-dir", "cache-dir"])
def test_a_second_server_of_a_directory_is_refused_and_names_the_first(
    running: CachedServer, tmp_path: Path, shared: str
) -> None:
    before = running.ask(PROMPT)
    options: dict[str, str | Path] = {
        "model": running.model_directory,
        "cache-disk": "64MiB",
        "cache-host": "64MiB",
        "adapter-dir": running.place / "adapters" if shared == "adapter-dir" else tmp_path / "adapters",
        "cache-dir": running.cache_directory if shared == "cache-dir" else tmp_path / "cache",
    }
    refused = second_server(tmp_path, options)
    said = refused.stdout + refused.stderr
    first = forked_server.frontend_of(running.model_directory)
    processes = {first.pid, *(process.pid for process in first.children(recursive=True))}
    assert refused.returncode == 2 and "Traceback" not in said
    assert f"--{shared}" in said and any(f"in use by process {pid}" in said for pid in processes), said
    assert "Load weight" not in said and "reading" not in said
    assert running.ask(PROMPT).tokens == before.tokens
