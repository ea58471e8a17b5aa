"""Empties the prefix cache of a running server. All tiers are emptied together, since a page that stayed in memory
would never be written to the disk again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from kt_runtime.errors import ConflictError, RequestTimeoutError

IDLE_SECONDS = 30.0
DISK_SECONDS = 30.0
POLL_SECONDS = 0.05

Tiers = dict[str, dict[str, Any]]


class Engine(Protocol):
    """`sglang_patch.frontend.Engine`."""

    async def flush_memory_tiers(self, wait_s: float) -> bool: ...

    async def clear_disk_tier(self) -> None: ...


class CacheClearing:
    """`status`: returns the server's status, as `/kt/status` does."""

    def __init__(self, status: Callable[[], Awaitable[dict[str, Any]]], engine: Engine) -> None:
        self._status, self._engine = status, engine

    async def clear(self) -> dict[str, Any]:
        """Returns `{"cleared": {tier: number of pages it held}}`. Works on a full disk.

        Raises ConflictError while requests are in flight, or if the disk tier's directory is unreachable or read-only,
        and RequestTimeoutError if the disk takes too long.
        """
        status = await self._status()
        before: Tiers = {tier["tier"]: tier for tier in status["cache"]}
        disk = before.get("disk")
        if disk is not None and (disk["read_only"] or disk["reading_stopped"]):
            reason = disk["reading_stopped"] or "this server only reads it"
            raise ConflictError(f"the cache's disk tier, {disk['directory']}, can't be emptied now: {reason}")
        if not await self._engine.flush_memory_tiers(IDLE_SECONDS):
            raise ConflictError(
                f"requests were in progress for {IDLE_SECONDS:g} s; the cache is emptied when none is; try again"
            )
        if disk is not None:
            await self._clear_disk(_disks(status))
        return {"cleared": {name: tier["pages"] for name, tier in before.items()}}

    async def _clear_disk(self, before: list[dict[str, Any]]) -> None:
        await self._engine.clear_disk_tier()
        deadline = time.monotonic() + DISK_SECONDS
        while True:
            disks = _disks(await self._status())
            left = [disk for old, disk in zip(before, disks, strict=True) if not _is_cleared(old, disk)]
            if not left:
                return
            if time.monotonic() > deadline:
                disk = left[0]
                raise RequestTimeoutError(
                    f"the cache's disk tier, {disk['directory']}, still holds {disk['pages']} records after "
                    f"{DISK_SECONDS:g} s{': ' + disk['writing_stopped'] if disk['writing_stopped'] else ''}"
                )
            await asyncio.sleep(POLL_SECONDS)


def _disks(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The disk tier, and each rank's part of it."""
    own = [tier for tier in status["cache"] if tier["tier"] == "disk"]
    return own + [rank["disk"] for rank in status.get("ranks", ()) if rank.get("disk")]


def _is_cleared(before: dict[str, Any], disk: dict[str, Any]) -> bool:
    """New requests run meanwhile and write new pages, so the tier need not be empty: the counter tells."""
    return disk["pages"] == 0 or disk["counters"]["cleared"] > before["counters"]["cleared"]
