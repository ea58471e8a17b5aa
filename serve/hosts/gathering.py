"""Brings the ranks of a server together, of one host or of several, before anything is loaded."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kt_runtime.errors import KtError
from kt_runtime.ranks.failures import FAILED, Failure
from kt_runtime.serve.hosts.facts import facts_of
from kt_runtime.serve.hosts.follower import Follower
from kt_runtime.serve.hosts.leader import Leader
from kt_runtime.serve.hosts.messages import ProcessLook
from kt_runtime.serve.hosts.place import HostPlace, interface_of
from kt_runtime.serve.models.report import ResolvedModel
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.sglang_patch.ranks import meeting
from kt_runtime.sglang_patch.ranks.processes import RANK, Look, placed
from kt_runtime.sglang_patch.ranks.watch import CAUSE_SECONDS, RankWatch

logger = logging.getLogger(__name__)

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable for gloo, which connects ranks: the interface whose first address it listens at. Unset: the host name's."""
LOOPBACK = "lo"
QUEUES = {"SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0"}
"""Turns SGLang's ZMQ queues between ranks off; gloo broadcasts instead. Between hosts the queues would listen at an
address that SGLang chooses by its own rules, which other hosts may not reach."""


@dataclass
class Gathered:
    """`environment`: variables of the ranks' processes. `watch`: of this host's ranks; None for one rank. `address`: of
    this host among several. `leader`, `follower`: what this host is of several."""

    environment: dict[str, str]
    watch: RankWatch | None = None
    address: str = ""
    leader: Leader | None = None
    follower: Follower | None = None
    _store: socket.socket | None = field(default=None, repr=False)  # open until the ranks have inherited it

    def end(self, lines: list[str], status: int) -> None:
        """Tells the other hosts that the server ends, if this is host 0. May be called more than once."""
        if self.leader is not None:
            self.leader.end(lines, status)

    def elsewhere(self) -> Mapping[str, Look]:
        """The ranks of other hosts, for `stalls.py`."""
        if self.leader is None:
            return {}
        return {
            placed(f"{RANK}{look.rank}", look.pid, host): Look(look.stopped, look.main_seconds)
            for host, look in self.leader.remote_looks()
        }


@contextlib.contextmanager
def gathered(
    options: ServeOptions,
    place: HostPlace | None,
    model: ResolvedModel,
    adapters: Path,
    say: Callable[[str], None],
    jobs: Path | None = None,
) -> Iterator[Gathered]:
    """Connects hosts and ranks for the block, in which the server runs. `options`: as the memory plan has completed
    them. `adapters`, `jobs`: directories that all hosts must see.

    An error in the block ends all hosts. Raises InvalidValueError, on all hosts, where they differ.
    """
    with contextlib.ExitStack() as held:
        if place is None:
            yield _of_one_host(options.tp_size, held)
            return
        facts, first_rank = facts_of(options, model), place.number * options.tp_size // place.count
        if place.number == 0:
            found = _leader(place, facts, adapters, jobs, say)
        else:
            found = _follower(place, facts, adapters, say)
        connection = found.leader or found.follower
        assert connection is not None
        reports = CAUSE_SECONDS if found.leader is not None else 0.0  # host 0 waits for all reports
        found.watch = watch = RankWatch(
            first_rank, f"host {place.number}, {found.address}", connection.shared, cause_s=reports
        )
        connection.shared.looks = lambda: _looks(watch)
        if (interface := interface_of(found.address)) is not None:
            found.environment[INTERFACE] = interface
        try:
            yield found
        except Exception as error:
            _ended_by(found, error)
            raise
        finally:
            found.end([], 0)
            if found.follower is not None:
                found.follower.close()


def _of_one_host(num_ranks: int, held: contextlib.ExitStack) -> Gathered:
    if num_ranks == 1:
        return Gathered({meeting.VARIABLE: meeting.ALONE, INTERFACE: LOOPBACK})
    store = held.enter_context(socket.create_server(("127.0.0.1", 0)))
    host, port = store.getsockname()
    environment = {meeting.VARIABLE: meeting.at(store, host, port), INTERFACE: LOOPBACK}
    return Gathered(environment, RankWatch(), _store=store)


def _leader(
    place: HostPlace, facts: dict[str, str], adapters: Path, jobs: Path | None, say: Callable[[str], None]
) -> Gathered:
    leader = Leader(place, facts, adapters, jobs=jobs)
    agreed = leader.meet(say)
    assert leader.store is not None
    leader.leaving = lambda: os.kill(os.getpid(), signal.SIGTERM)
    environment = {meeting.VARIABLE: meeting.at(leader.store, place.address, agreed.store_port), **QUEUES}
    return Gathered(environment, address=place.address, leader=leader)


def _follower(place: HostPlace, facts: dict[str, str], adapters: Path, say: Callable[[str], None]) -> Gathered:
    follower = Follower(place, facts, adapters)
    agreed = follower.meet(say)
    say(f"the hosts have the same versions, weights and options: {', '.join(agreed.addresses)}")
    environment = {meeting.VARIABLE: meeting.elsewhere(place.address, agreed.store_port), **QUEUES}
    return Gathered(environment, address=follower.own_address, follower=follower)


def _looks(watch: RankWatch) -> list[ProcessLook]:
    return [
        ProcessLook(rank=rank, pid=pid, stopped=look.stopped, main_seconds=look.main_seconds)
        for rank, pid, look in watch.looks()
    ]


def _ended_by(found: Gathered, error: Exception) -> None:
    status = error.exit_status if isinstance(error, KtError) else 1
    found.end([str(error)], status)
    if found.follower is not None and not found.follower.shared.ended.is_set():
        found.follower.report(Failure(str(error), FAILED, status))
