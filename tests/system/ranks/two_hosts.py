"""A server of two hosts, each a network namespace of this machine."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from reference.ranks import network
from system import forked_server

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import free_port

SECONDS = 120.0
OPTIONS = ("--expert-threads", "1", "--max-lora-rank", "8", "--dtype", "bfloat16", "--max-total-tokens", "4096")


@dataclass
class Host:
    """A running `kt-runtime serve`. `tree`: its process and all that it has started, as far as was looked."""

    process: Any
    log: Path
    tree: dict[int, psutil.Process] = field(default_factory=dict)

    def look(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            self.tree |= {each.pid: each for each in (own, *own.children(recursive=True))}
        return list(self.tree.values())

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def has_ended(self) -> bool:
        return not any(lives(each) for each in self.tree.values())


@dataclass
class Pair:
    """Hosts 0 and 1 of one server. `api`: of host 0, for the test's thread."""

    hosts: list[Host]
    api: ServerAPI

    def rank(self, number: int) -> psutil.Process:
        return psutil.Process(self.api.get("/kt/status")["ranks"][number]["pid"])

    def wait_for_the_end(self) -> list[int | None]:
        """The hosts' exit statuses, once none of their processes lives."""
        until(lambda: all(host.has_ended() for host in self.hosts), "the hosts to end")
        return [host.process.wait(SECONDS) for host in self.hosts]


@contextlib.contextmanager
def pair(
    directory: Path, ends: tuple[network.End, network.End], name: str, *options: str, of_host_1: tuple[str, ...] = ()
) -> Iterator[Pair]:
    """Both hosts, started at once; they may not be ready."""
    port, meeting = free_port(), f"{ends[0].address}:{free_port()}"
    hosts: list[Host] = []
    with contextlib.ExitStack() as held:
        for number, end in enumerate(ends):
            arguments = [*OPTIONS, "--tp-size", "2", "--nnodes", "2", "--node-rank", str(number), *options]
            arguments += ["--dist-init-addr", meeting, "--port", str(port), "--adapter-dir", str(directory / name)]
            command = ["", "serve", "--model", str(directory / "model"), "--verbose", *arguments]
            log = directory / f"{name}-{number}.log"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(network.VARIABLE, end.namespace)
                started = forked_server.start([*command, *(of_host_1 if number else ())], log)
            hosts.append(Host(started, log))
            held.callback(end_all, hosts[-1])
        yield Pair(hosts, ServerAPI(f"http://127.0.0.1:{port}"))


def end_all(host: Host) -> None:
    for process in host.look():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    host.process.send_signal(15)
    with contextlib.suppress(subprocess.TimeoutExpired):
        host.process.wait(SECONDS)
    for process in host.tree.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def ready(pair: Pair) -> None:
    def is_ready() -> bool:
        for host in pair.hosts:
            assert host.process.poll() is None, host.said()
        return pair.api.is_ready()

    until(is_ready, "the server to be ready")
    for host in pair.hosts:
        host.look()


FAULTS = {
    "rank 1 killed": "rank 1 (process {pid} on host 1, 10.77.0.2) has died: SIGKILL",
    "rank 1 stopped": "rank 1 (process {pid} on host 1, 10.77.0.2) is stopped by a signal",
    "rank 0 killed": "rank 0 (process {pid} on host 0, 10.77.0.1) has died: SIGKILL",
    "link down": "host 1 (10.77.0.2) is cut off: it can't be reached any longer",
    "host 1 killed": "host 1 (10.77.0.2) has gone: ",
}
"""How a server of two hosts ends, and why, as host 0 says it."""


def end_by(
    how: str, hosts: Pair, ends: tuple[network.End, network.End], just_before: Callable[[], None] = lambda: None
) -> None:
    """All hosts end and name the one at fault, and so does the stream of a client. `how`: one of FAULTS. Each is the
    end of a server on which a test has done other things.

    `just_before`: called immediately before the fault.
    """
    pid = hosts.rank(int(how.split()[1])).pid if how.startswith("rank") else 0
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(_streamed, hosts.api)
        until(lambda: hosts.api.get("/kt/status")["requests_in_flight"] > 0, "a request to run")
        began = time.monotonic()
        just_before()
        _strike(how, pid, hosts, ends)
        statuses = hosts.wait_for_the_end()
        print(f"{how}: all processes have ended after {time.monotonic() - began:.1f} s")
        heard = stream.result(SECONDS)
    assert "error" in heard or '"status_code":503' in heard
    assert statuses == [1, -9 if how == "host 1 killed" else 1]
    here, there = (host.said() for host in hosts.hosts)
    why = FAULTS[how].format(pid=pid)
    assert why in here and "; the server ends" in here
    if how.startswith("rank"):
        assert f"kt-runtime: {why}; the server ends" in there
    elif how == "link down":
        assert "kt-runtime: host 0 (10.77.0.1) is cut off" in there


def _strike(how: str, pid: int, hosts: Pair, ends: tuple[network.End, network.End]) -> None:
    match how.split():
        case ["rank", _, "killed"]:
            psutil.Process(pid).kill()
        case ["rank", _, "stopped"]:
            psutil.Process(pid).suspend()
        case ["link", "down"]:
            ends[1].set("down")
        case ["host", "1", "killed"]:
            hosts.hosts[1].process.send_signal(9)


def _streamed(api: ServerAPI) -> str:
    """How a long answer ended: its last line before [DONE], or the error."""
    sampling = {"max_new_tokens": 3000, "ignore_eos": True}
    body = {"input_ids": [5, 6], "stream": True, "sampling_params": sampling}
    last = "no error"
    try:
        with httpx.stream("POST", f"{api.url}/generate", json=body, timeout=SECONDS, trust_env=False) as answer:
            for line in answer.iter_lines():
                last = line if line and "[DONE]" not in line else last
    except httpx.HTTPError as error:
        return f"error: {error!r}"
    return last


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
