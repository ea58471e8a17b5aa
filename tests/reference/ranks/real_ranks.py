"""Real ranks on this machine: forks of the test's process, which exchange through sockets or shared memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kt_runtime.ranks import Exchange, shared_memory_of, sockets_of

SECONDS = 120.0
KINDS = ("sockets", "memory")
"""Of exchanges: as between machines, and within one."""


def run_ranks(num_ranks: int, work: Callable[[Exchange], Any], kind: str = "sockets") -> list[Any]:
    """`work(exchange)` of every rank at once, in a process of its own; the results in the ranks' order. `kind`: one of
    KINDS.

    Raises AssertionError with the traceback of a rank that fails.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="kt-ranks-") as directory:
        started = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(Path(directory), rank, num_ranks, work, kind, theirs))
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            answers = [_answer(connection) for _, connection in started]
        finally:
            for process, connection in started:
                process.join(SECONDS)
                process.kill()
                connection.close()
    failed = [problem for problem, _ in answers if problem]
    assert not failed, "\n".join(failed)
    return [result for _, result in answers]


def _answer(connection: Connection) -> tuple[str, Any]:
    assert connection.poll(SECONDS), "a rank does not answer"
    try:
        found: tuple[str, Any] = pickle.loads(connection.recv_bytes())
    except EOFError:
        return "a rank has died", None
    return found


def _rank(
    directory: Path,
    rank: int,
    num_ranks: int,
    work: Callable[[Exchange], Any],
    kind: str,
    connection: Connection,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{directory}/met", rank=rank, world_size=num_ranks)
        assert dist.group.WORLD is not None
        world = dist.group.WORLD
        exchange = sockets_of(world, "127.0.0.1") if kind == "sockets" else shared_memory_of(world)
        # `send` would leave a tensor's memory with this process, which ends.
        connection.send_bytes(pickle.dumps(("", work(exchange))))
        dist.barrier()
    except Exception:  # noqa: BLE001 - the test's process raises it
        connection.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    finally:
        connection.close()
        os._exit(0)
