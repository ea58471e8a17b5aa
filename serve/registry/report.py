"""What GET /kt/registry answers, and `registry` in GET /kt/status."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kt_runtime.registry import ServedRevision
from kt_runtime.serve.registry.entry import Entry
from kt_runtime.serve.registry.peers import Peer


class NotMoved(msgspec.Struct, kw_only=True):
    """A replica on which a name does not mean the newest revision. `revision`: in effect there, 0: none.

    `silent_s`: seconds since the replica was last seen alive.
    """

    replica: str
    revision: int
    problem: str | None
    silent_s: float


class NameReport(msgspec.Struct, kw_only=True):
    """`revision`: the highest that this server has seen. `version`: what it says; None: the name is unloaded.
    `published_by`: a replica.

    `revision_here`: in effect on this server; `version_here`: what requests get. `problem`: why the two differ.
    `is_unpublished`: this server's version is not in the registry yet.
    """

    name: str
    revision: int
    version: str | None
    published_by: str
    revision_here: int
    version_here: str | None
    is_unpublished: bool
    problem: str | None
    not_moved: list[NotMoved]


class ReplicaReport(msgspec.Struct, kw_only=True):
    """`behind`: names that do not mean the newest revision there. `silent_s`: seconds without a sign of life, by this
    server's clock. `clock_offset_s`: the replica's clock minus this server's when its last sign was seen, less the time
    until it was seen; nothing depends on it."""

    replica: str
    url: str
    is_this: bool
    behind: int
    silent_s: float
    clock_offset_s: float


class RegistryReport(msgspec.Struct, kw_only=True):
    """`place`: the directory or URL. `problem`: why this server neither takes from the registry nor writes to it.

    `waiting_s`: for so long the registry has not answered the present call. `caught_up`: every name has been tried
    since the start.
    """

    place: str
    replica: str
    registry: str
    problem: str | None
    waiting_s: float
    caught_up: bool
    names: list[NameReport]
    replicas: list[ReplicaReport]


def name_report(name: str, entry: Entry, this: str, peers: list[Peer]) -> NameReport:
    not_moved = []
    for peer in peers:
        there = peer.heartbeat.names.get(name, ServedRevision(revision=0))
        if peer.heartbeat.replica != this and there.revision < entry.seen:
            not_moved.append(
                NotMoved(
                    replica=peer.heartbeat.replica,
                    revision=there.revision,
                    problem=there.problem,
                    silent_s=peer.silent_s,
                )
            )
    if entry.settled < entry.seen:
        not_moved.append(NotMoved(replica=this, revision=entry.settled, problem=entry.says, silent_s=0.0))
    newest = entry.newest
    return NameReport(
        name=name,
        revision=entry.seen,
        version=None if newest is None else newest.version,
        published_by="" if newest is None else newest.replica,
        revision_here=entry.settled,
        version_here=entry.here,
        is_unpublished=entry.pending is not None,
        problem=entry.says,
        not_moved=not_moved,
    )


def replica_report(peer: Peer, this: str, newest: Mapping[str, int]) -> ReplicaReport:
    """`newest`: the highest revision of each name."""
    heartbeat = peer.heartbeat
    at = {name: served.revision for name, served in heartbeat.names.items()}
    return ReplicaReport(
        replica=heartbeat.replica,
        url=heartbeat.url,
        is_this=heartbeat.replica == this,
        behind=sum(at.get(name, 0) < revision for name, revision in newest.items()),
        silent_s=peer.silent_s,
        clock_offset_s=peer.clock_offset_s,
    )
