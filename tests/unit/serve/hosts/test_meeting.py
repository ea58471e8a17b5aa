"""Two hosts meet over real sockets, at two addresses of the loopback interface."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.cli.server_process import free_port
from kt_runtime.errors import InvalidValueError, RequestTimeoutError
from kt_runtime.ranks.failures import CUT_OFF, SIGNALLED, Failure
from kt_runtime.serve.hosts import follower as followers
from kt_runtime.serve.hosts import leader as leaders
from kt_runtime.serve.hosts.follower import Follower
from kt_runtime.serve.hosts.leader import Leader
from kt_runtime.serve.hosts.messages import LENGTH, ProcessLook
from kt_runtime.serve.hosts.place import HostPlace

SECONDS = 60.0
FACTS = {"kt-runtime": "1", "weights": "ab"}


class Hosts:
    """`count` hosts at one port; `adapters` is the directory of all."""

    def __init__(self, adapters: Path, count: int = 2, jobs: Path | None = None) -> None:
        self.adapters, self.count, self.port = adapters, count, free_port()
        self.leader = Leader(self.place(0), FACTS, adapters, jobs=jobs)
        self.said: list[str] = []
        self.followers: list[Follower] = []

    def place(self, number: int) -> HostPlace:
        return HostPlace(number, self.count, "127.0.0.1", self.port, f"127.0.0.1:{self.port}")

    def follower(self, number: int = 1, facts: dict[str, str] | None = None, **given: Any) -> Follower:
        made = Follower(self.place(number), facts or FACTS, given.pop("adapters", self.adapters), **given)
        self.followers.append(made)
        return made

    def meet(self, *followers: Follower) -> list[Any]:
        """What each of the hosts got, host 0 first: its agreement or its error."""
        with ThreadPoolExecutor(1 + len(followers)) as pool:
            meets: list[Callable[[Callable[[str], Any]], Any]] = [self.leader.meet, *(each.meet for each in followers)]
            meeting = [pool.submit(meet, self.said.append) for meet in meets]
            return [each.exception(SECONDS) or each.result() for each in meeting]

    def close(self) -> None:
        self.leader.end([], 0)
        for each in self.followers:
            each.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_equal_hosts_agree_on_where_ranks_meet(hosts: Hosts) -> None:
    here, there = hosts.meet(hosts.follower())
    assert here == there and here.addresses == ["127.0.0.1", "127.0.0.1"]
    assert hosts.leader.store is not None and hosts.leader.store.getsockname() == ("127.0.0.1", here.store_port)
    assert hosts.followers[0].own_address == "127.0.0.1"
    assert not list(hosts.adapters.iterdir())


def test_a_host_may_come_before_host_0_and_three_meet(tmp_path: Path) -> None:
    early = Follower(HostPlace(2, 3, "127.0.0.1", port := free_port(), "x"), FACTS, tmp_path)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(early.meet, print)
        leader = Leader(HostPlace(0, 3, "127.0.0.1", port, "x"), FACTS, tmp_path)
        second = Follower(HostPlace(1, 3, "127.0.0.1", port, "x"), FACTS, tmp_path)
        found = [
            each.result(SECONDS) for each in (pool.submit(leader.meet, print), first, pool.submit(second.meet, print))
        ]
    assert found[0] == found[1] == found[2]
    leader.end([], 0)
    for each in (early, second):
        assert each.shared.ended.wait(SECONDS) and (each.shared.lines, each.shared.status) == ([], 0)
        each.close()


def test_hosts_that_differ_are_refused_everywhere_with_both_values(hosts: Hosts) -> None:
    other = {"kt-runtime": "2", "weights": "cd"}
    for error in hosts.meet(hosts.follower(facts=other)):
        assert isinstance(error, InvalidValueError) and error.exit_status == 2
        assert "kt-runtime: host 0 has 1, host 1 (127.0.0.1) has 2" in str(error)
        assert "weights: host 0 has ab, host 1 (127.0.0.1) has cd" in str(error)


@pytest.mark.parametrize("offset", [-61.0, 61.0])
def test_clocks_apart_are_refused_everywhere(hosts: Hosts, offset: float) -> None:
    for error in hosts.meet(hosts.follower(clock=lambda: time.time() + offset)):
        assert isinstance(error, InvalidValueError) and "clock: host 0 has " in str(error)
        assert "61." in str(error) or "60.9" in str(error)


def test_another_directory_of_adapters_is_refused_everywhere(hosts: Hosts, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    for error in hosts.meet(hosts.follower(adapters=elsewhere)):
        assert isinstance(error, InvalidValueError)
        assert f"--adapter-dir: host 0 has {tmp_path}, host 1 (127.0.0.1) has {elsewhere}" in str(error)


@pytest.mark.parametrize("place", ["shared", "in the adapters' directory", "of host 0"])
def test_a_directory_of_jobs_that_another_host_does_not_see_is_refused_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Both hosts are on this machine. Host 1 looks at other paths where it has another disk."""
    (adapters := tmp_path / "adapters").mkdir()
    (jobs := adapters / "jobs" if place == "in the adapters' directory" else tmp_path / "jobs").mkdir()
    if place != "shared":
        on_disk = followers.Path
        monkeypatch.setattr(followers, "Path", lambda path: on_disk(str(path).replace(str(jobs), "/of-host-1")))
    hosts = Hosts(adapters, jobs=jobs)
    try:
        for found in hosts.meet(hosts.follower()):
            if place == "of host 0":
                assert isinstance(found, InvalidValueError)
                said = f"--finetuning-dir: host 0 has {jobs}, which host 1 (127.0.0.1) does not see"
                assert said in str(found)
            else:
                assert not isinstance(found, BaseException), found
    finally:
        hosts.close()
    assert list(jobs.iterdir()) == []


def test_a_number_that_is_taken_or_too_high_is_refused_and_the_others_go_on(hosts: Hosts) -> None:
    hosts.meet(hosts.follower())
    with pytest.raises(InvalidValueError, match=r"--node-rank 1: 127\.0\.0\.1 has it already"):
        hosts.follower(1).meet(print)
    with pytest.raises(InvalidValueError, match="--node-rank 5: host 0 has --nnodes 2"):
        hosts.follower(5).meet(print)
    assert not hosts.leader.shared.failures()


@pytest.mark.slow
def test_a_host_that_does_not_come_is_named(tmp_path: Path) -> None:
    port = free_port()
    leader = Leader(HostPlace(0, 3, "127.0.0.1", port, "x:1"), FACTS, tmp_path, join_s=0.3)
    with pytest.raises(RequestTimeoutError, match=r"hosts 1, 2 of 3 did not come to x:1 within 0.3 s"):
        leader.meet(print)
    follower = Follower(HostPlace(1, 3, "127.0.0.1", port, "x:1"), FACTS, tmp_path, join_s=0.3)
    with pytest.raises(RequestTimeoutError, match=r"host 0 has not agreed at --dist-init-addr x:1 within 0\.3 s"):
        follower.meet(print)


def test_whoever_says_nothing_sensible_is_left_alone(hosts: Hosts) -> None:
    said = [b"GET / HTTP/1.1\r\n\r\n", LENGTH.pack(1 << 30), LENGTH.pack(3) + b"abc", b""]
    for text in said:
        with socket.create_connection(("127.0.0.1", hosts.port), SECONDS) as opened:
            opened.sendall(text)
    assert hosts.meet(hosts.follower())[0].store_port


def test_why_the_server_ends_reaches_the_other_hosts(hosts: Hosts) -> None:
    hosts.meet(follower := hosts.follower())
    follower.report(Failure("rank 1 has died", SIGNALLED))
    until(lambda: bool(hosts.leader.shared.failures()))
    assert hosts.leader.shared.failures() == [Failure("rank 1 has died", SIGNALLED)]
    hosts.leader.end(["rank 1 has died; the server ends"], 1)
    assert follower.shared.ended.wait(SECONDS)
    assert (follower.shared.lines, follower.shared.status) == (["rank 1 has died; the server ends"], 1)
    assert not follower.shared.failures()


def test_a_host_that_is_asked_to_end_asks_host_0(hosts: Hosts) -> None:
    asked = threading.Event()
    hosts.leader.leaving = asked.set
    hosts.meet(follower := hosts.follower())
    follower.leave()
    assert asked.wait(SECONDS)


def test_ranks_of_other_hosts_are_seen(hosts: Hosts) -> None:
    look = ProcessLook(rank=1, pid=7, stopped=True, main_seconds=2.5)
    follower = hosts.follower()
    follower.shared.looks = lambda: [look]
    hosts.meet(follower)
    until(lambda: bool(hosts.leader.remote_looks()))
    assert hosts.leader.remote_looks() == [("host 1 (127.0.0.1)", look)]


def test_a_host_that_has_gone_is_named_on_both_sides(hosts: Hosts) -> None:
    hosts.meet(follower := hosts.follower())
    follower.close()
    until(lambda: bool(hosts.leader.shared.failures()))
    (failure,) = hosts.leader.shared.failures()
    assert failure.kind == CUT_OFF and failure.why.startswith("host 1 (127.0.0.1) has gone: ")


def test_host_0_that_has_gone_is_named(hosts: Hosts) -> None:
    hosts.meet(follower := hosts.follower())
    other = next(iter(hosts.leader._others.values()))
    hosts.leader._loop.call(other.stream.close())  # as if its process had died, without a word
    until(lambda: bool(follower.shared.failures()))
    (failure,) = follower.shared.failures()
    assert failure.kind == CUT_OFF and failure.why.startswith("host 0 (127.0.0.1) has gone: ")


@pytest.mark.slow
@pytest.mark.parametrize("silent", ["host 1", "host 0"])
def test_a_host_that_sends_nothing_is_noticed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    """A process that is stopped keeps its connections. Its loop stands still here, and the other side's patience is
    short."""
    patient, short = (followers, leaders) if silent == "host 1" else (leaders, followers)
    monkeypatch.setattr(short, "SILENT_BEFORE_RANKS_SECONDS", 0.5)
    monkeypatch.setattr(short, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(patient, "BEAT_SECONDS", SECONDS)
    hosts.meet(follower := hosts.follower())
    shared = hosts.leader.shared if silent == "host 1" else follower.shared
    until(lambda: bool(shared.failures()))
    assert shared.failures()[0].kind == CUT_OFF
    assert f"{silent} (127.0.0.1) has given no sign of life for " in shared.failures()[0].why
