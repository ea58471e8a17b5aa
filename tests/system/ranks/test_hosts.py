"""Two hosts, each a network namespace of this machine, joined by a link of 10 Gbit/s: the answers of one process, and
what happens when a rank or the link fails."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from reference import lora
from reference.server import network
from reference.server.greedy import ask
from reference.server.rank_traffic import sent_bytes
from system import forked_server

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import free_port, server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset

SECONDS = 120.0
PROMPTS = ([5, 6, 7], list(range(3, 150)), [9])
OPTIONS = ("--expert-threads", "1", "--max-lora-rank", "8", "--dtype", "bfloat16", "--max-total-tokens", "4096")
CONFIG = load_preset("tiny-qwen3-moe").config


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hosts")
    make_model("tiny-qwen3-moe", directory / "model", seed=6)
    lora.write_adapter(directory / "adapter", lora.random_adapter(CONFIG, rank=4, alpha=12.0, seed=1))
    return directory


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[network.End, network.End]]:
    """The link between two hosts. The test's thread is on host 0, and so are servers that it starts."""
    with network.link() as (here, there), network.within(here.namespace):
        monkeypatch.setenv(network.VARIABLE, here.namespace)
        yield here, there


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


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_two_hosts_answer_as_one_process_and_send_what_they_must(
    directory: Path, ends: tuple[network.End, network.End]
) -> None:
    with server(
        str(directory / "model"), [*OPTIONS, "--adapter-dir", str(directory / "one")], directory / "one.log"
    ) as one:
        one.post("/kt/adapters", {"name": "a", "path": str(directory / "adapter")})
        expected = [ask(one, prompt, name) for prompt in PROMPTS for name in (None, "a")]
    with pair(directory, ends, "two") as hosts:
        ready(hosts)
        hosts.api.post("/kt/adapters", {"name": "a", "path": str(directory / "adapter")})
        assert [ask(hosts.api, prompt, name) for prompt in PROMPTS for name in (None, "a")] == expected
        assert_status_names_hosts(hosts, ends)
        assert_nothing_listens_elsewhere(hosts, ends)
        assert_bytes(hosts, ends)
        hosts.hosts[1].process.send_signal(15)  # a host that is asked to end ends all
        assert hosts.wait_for_the_end() == [0, 0]
    assert "host 1 is ready" in hosts.hosts[1].said() and "host 1 ends: the server has ended" in hosts.hosts[1].said()
    assert "Uvicorn" not in hosts.hosts[1].said()


def assert_status_names_hosts(hosts: Pair, ends: tuple[network.End, network.End]) -> None:
    ranks = hosts.api.get("/kt/status")["ranks"]
    assert [(each["host"], each["address"]) for each in ranks] == [(n, end.address) for n, end in enumerate(ends)]
    assert [each["is_slowest"] for each in ranks].count(True) == 1
    assert all(each["peak_bytes"] >= each["rss_bytes"] > 0 and 0 <= each["waiting_share"] <= 1 for each in ranks)


def assert_nothing_listens_elsewhere(hosts: Pair, ends: tuple[network.End, network.End]) -> None:
    for host, end in zip(hosts.hosts, ends, strict=True):
        listens = {
            connection.laddr.ip
            for process in host.look()
            for connection in connections_within(process, end.namespace)
            if connection.status == psutil.CONN_LISTEN
        }
        assert end.address in listens and listens <= {end.address, "127.0.0.1"}, listens


def connections_within(process: psutil.Process, namespace: str) -> list[Any]:
    with contextlib.suppress(psutil.NoSuchProcess), network.within(namespace):
        return list(process.net_connections())
    return []


def assert_bytes(hosts: Pair, ends: tuple[network.End, network.End]) -> None:
    """Of a decoded token: what was counted on paper goes through the exchange, but for the logits, which SGLang has.
    The link carries headers too, which are most of it where a message has a hundred bytes."""
    exchanged = sent_bytes(CONFIG, num_ranks=2, activation_bytes=2).needed - int(CONFIG["vocab_size"])
    tokens, counted = 256, exchanged_bytes(hosts)
    before = [end.sent_bytes() for end in ends]
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}}
    assert len(hosts.api.post("/generate", body)["output_ids"]) == tokens
    measured = [(end.sent_bytes() - start) / tokens for end, start in zip(ends, before, strict=True)]
    of_ranks = (exchanged_bytes(hosts) - counted) / 2
    print(f"bytes of a token: on the link {measured}, exchanged {of_ranks / tokens:.0f}, on paper {exchanged:.0f}")
    assert min(measured) > exchanged
    assert tokens * exchanged <= of_ranks <= 1.02 * (tokens + 2) * exchanged  # and some bytes about each batch


def exchanged_bytes(hosts: Pair) -> float:
    """Of both ranks. They tell it when a request comes, if they have not told it within a second; that request, of one
    token, may count or not."""
    time.sleep(1.2)
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    hosts.api.post("/generate", {"input_ids": [9], "sampling_params": sampling})
    return float(sum(each["sent_bytes"] for each in hosts.api.get("/kt/status")["ranks"]))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("rank 1 killed", r"rank 1 (process {pid} on host 1, 10.77.0.2) has died: SIGKILL"),
        ("rank 1 stopped", r"rank 1 (process {pid} on host 1, 10.77.0.2) is stopped by a signal"),
        ("rank 0 killed", r"rank 0 (process {pid} on host 0, 10.77.0.1) has died: SIGKILL"),
        ("link down", "host 1 (10.77.0.2) is cut off: it can't be reached any longer"),
        ("host 1 killed", "host 1 (10.77.0.2) has gone: "),
    ],
)
def test_all_hosts_end_and_name_the_one_at_fault(
    directory: Path, ends: tuple[network.End, network.End], how: str, why: str
) -> None:
    name = how.replace(" ", "-")
    with pair(directory, ends, name) as hosts:
        ready(hosts)
        pid = hosts.rank(int(how.split()[1])).pid if how.startswith("rank") else 0
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(streamed, hosts.api)
            until(lambda: hosts.api.get("/kt/status")["requests_in_flight"] > 0, "a request to run")
            began = time.monotonic()
            strike(how, pid, hosts, ends)
            statuses = hosts.wait_for_the_end()
            print(f"{how}: all processes have ended after {time.monotonic() - began:.1f} s")
            heard = stream.result(SECONDS)
            print(heard)
            assert "error" in heard or '"status_code":503' in heard
    assert statuses == [1, -9 if how == "host 1 killed" else 1]
    assert why.format(pid=pid) in hosts.hosts[0].said() and "; the server ends" in hosts.hosts[0].said()
    if how.startswith("rank"):
        assert f"kt-runtime: {why.format(pid=pid)}; the server ends" in hosts.hosts[1].said()
    elif how == "link down":
        assert "kt-runtime: host 0 (10.77.0.1) is cut off" in hosts.hosts[1].said()


def strike(how: str, pid: int, hosts: Pair, ends: tuple[network.End, network.End]) -> None:
    match how.split():
        case ["rank", _, "killed"]:
            psutil.Process(pid).kill()
        case ["rank", _, "stopped"]:
            psutil.Process(pid).suspend()
        case ["link", "down"]:
            ends[1].set("down")
        case ["host", "1", "killed"]:
            hosts.hosts[1].process.send_signal(9)


def streamed(api: ServerAPI) -> str:
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


def test_a_rank_that_is_stopped_while_it_loads_ends_all_hosts(
    directory: Path, ends: tuple[network.End, network.End]
) -> None:
    with pair(directory, ends, "loading") as hosts:
        stopped: list[psutil.Process] = []

        def found() -> bool:
            hosts.hosts[0].look()
            stopped[:] = [each for each in hosts.hosts[1].look() if "scheduler" in title(each)]
            return bool(stopped)

        until(found, "rank 1 to be started")
        stopped[0].suspend()
        began = time.monotonic()
        assert hosts.wait_for_the_end() == [1, 1]
        print(f"stopped while loading: all processes have ended after {time.monotonic() - began:.1f} s")
    why = f"rank 1 (process {stopped[0].pid} on host 1, 10.77.0.2) is stopped by a signal; the server ends"
    assert all(why in host.said() for host in hosts.hosts)


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.mark.parametrize("of_host_1", [("--dtype", "float32"), ("--max-running-requests", "7")])
def test_hosts_with_other_options_are_refused_on_both(
    directory: Path, ends: tuple[network.End, network.End], of_host_1: tuple[str, ...]
) -> None:
    here = {"--dtype": "bfloat16", "--max-running-requests": "32"}[of_host_1[0]]
    with pair(directory, ends, "refused", of_host_1=of_host_1) as hosts:
        assert hosts.wait_for_the_end() == [2, 2]
    line = f"{of_host_1[0]}: host 0 has {here}, host 1 (10.77.0.2) has {of_host_1[1]}"
    assert all(f"the hosts differ, so nothing is loaded: {line}" in host.said() for host in hosts.hosts)


def test_a_rank_killed_while_it_publishes_leaves_nothing_half_published_and_a_restart_goes_on(
    directory: Path, ends: tuple[network.End, network.End]
) -> None:
    with pair(directory, ends, "publishing") as hosts:
        ready(hosts)
        hosts.api.post("/kt/adapters", {"name": "a", "path": str(directory / "adapter")})
        expected = ask(hosts.api, PROMPTS[1], "a")
        until(lambda: not hosts.api.get("/kt/status")["not_stored"], "the version to be on disk")
        lora.write_adapter(directory / "next", lora.random_adapter(CONFIG, rank=8, alpha=12.0, seed=2))
        errors: list[Exception] = []

        def publish() -> None:
            try:
                hosts.api.post("/kt/adapters", {"name": "a", "path": str(directory / "next")})
            except Exception as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        rank = hosts.rank(1)
        thread = threading.Thread(target=publish)
        thread.start()
        rank.kill()
        assert hosts.wait_for_the_end() == [1, 1]
        thread.join(SECONDS)
    with server(
        str(directory / "model"), [*OPTIONS, "--adapter-dir", str(directory / "publishing")], directory / "again.log"
    ) as again:
        versions = again.get("/kt/adapters/a")["versions"]
        assert 1 <= len(versions) <= 2 and all(each["version"] for each in versions)
        if errors and len(versions) == 1:
            assert ask(again, PROMPTS[1], "a") == expected
    assert not list((directory / "publishing").glob(".tmp-*"))
