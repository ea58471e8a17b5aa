"""The replica of a running server: it watches the server's names, and is shown under /kt/registry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from kt_runtime.serve.http.adapters import Adapters
from kt_runtime.serve.http.front_door import FrontDoor
from kt_runtime.serve.http.names import NamesServer
from kt_runtime.serve.registry.here import ThisServer
from kt_runtime.serve.registry.joining import Joining
from kt_runtime.serve.registry.replica import Replica


@contextlib.asynccontextmanager
async def replica_of(
    asked: Joining | None, adapters: Adapters, names: NamesServer, directory: Path, door: FrontDoor
) -> AsyncIterator[None]:
    """Runs a replica in the block. `directory`: of published versions. `asked` None: no registry."""
    if asked is None:
        yield
        return
    here = ThisServer(adapters, directory)
    replica = Replica(asked.registry, here, asked.file, asked.state, asked.about)

    def report() -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(replica.report())
        return found

    names.watcher, adapters.registry, door.catching_up = replica, report, lambda: replica.is_catching_up
    replica.start()
    try:
        yield
    finally:
        await asyncio.to_thread(replica.close)
