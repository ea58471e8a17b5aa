"""The frontend's adapter names, which the resident moves to other adapter versions (`wire.messages.MoveName`).

A `WireServer` receives the moves; the event loop of the HTTP server executes them. A move is atomic: each request uses
either the old or the new version. The resident drops the old version after the last request that started with the old
version has ended; until then both versions stay loaded.

A move carries the resident's deadline for it (CLOCK_MONOTONIC, which all processes of a machine share). The frontend
refuses a late move, so that no name moves to a version that the resident has already given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from kt_runtime.errors import ConflictError, KtError, UserError
from kt_runtime.wire import Incoming, WireServer, codec, error_reply
from kt_runtime.wire.codec import MEBIBYTE
from kt_runtime.wire.messages import MoveName
from kt_runtime.wire.replies import DoneReply

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024
MAX_PENDING = 1 << 16
CLOSING_SECONDS = 1.0
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 30.0


class Registry(Protocol):
    """Maps names to serving copies (`lora_id`), and counts the requests that use each copy."""

    def move(self, name: str, lora_id: str) -> str | None:
        """Maps `name` to `lora_id`; returns the previous `lora_id`, or None."""
        ...

    def remove(self, name: str) -> str | None:
        """Removes `name`; returns its `lora_id`, or None."""
        ...

    def names(self) -> dict[str, str]: ...

    def num_in_flight(self, lora_id: str) -> int: ...

    async def wait_unused(self, lora_id: str) -> None: ...

    def forget(self, lora_id: str) -> None:
        """Deletes the entry of `lora_id`, which no request uses any more."""
        ...


class Watcher(Protocol):
    """Is told what the names mean, in the event loop; must return at once."""

    def moved(self, name: str, version: str) -> None: ...

    def removed(self, name: str) -> None: ...


class NamesServer:
    """Listens inside `async with`. `drop(lora_id)` frees a serving copy in the resident; it is retried until it works.

    `reserved`: names that no adapter may have, since they mean the model itself.
    """

    def __init__(
        self,
        address: str,
        registry: Registry,
        drop: Callable[[str], Awaitable[None]],
        reserved: Collection[str] = (),
    ) -> None:
        self.address, self.registry, self.reserved = address, registry, reserved
        self.watcher: Watcher | None = None
        self._drop = drop
        self._draining: dict[str, asyncio.Task[None]] = {}
        self._dropping: set[str] = set()

    async def __aenter__(self) -> NamesServer:
        self._wire = WireServer(
            self.address,
            decode=codec.decode_move,
            max_message_bytes=MAX_MESSAGE_BYTES,
            answers_kept_bytes=MEBIBYTE,
            max_pending=MAX_PENDING,  # a restart moves all names at once
        )
        asyncio.get_running_loop().add_reader(self._wire.wakeup_fd, self._answer_all)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._wire.wakeup_fd)
        tasks = list(self._draining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._wire.close(CLOSING_SECONDS)

    def check_name(self, name: str) -> None:
        """Raises ConflictError for a reserved name."""
        if name in self.reserved:
            raise ConflictError(f"adapter name {name!r}: requests with this name mean the model; choose another name")

    def move(self, move: MoveName) -> None:
        """Raises ConflictError for a late move, a move to a copy that is being dropped, and a reserved name."""
        self.check_name(move.name)
        late_s = time.monotonic() - move.expires_at
        if late_s > 0:
            raise ConflictError(f"the move of {move.name!r} came {late_s:.1f} s after the resident stopped waiting")
        if move.lora_id in self._dropping:
            raise ConflictError(f"adapter {move.name!r}: serving copy {move.lora_id} is being dropped")
        former = self.registry.move(move.name, move.lora_id)
        logger.info("adapter %s is version %s now (%s)", move.name, move.adapter_version[:16], move.lora_id)
        if former is not None and former != move.lora_id:
            self._drain(former)
        if self.watcher is not None:
            self.watcher.moved(move.name, move.adapter_version)

    def remove(self, name: str) -> str | None:
        """Removes `name` at once; returns its `lora_id`. The copy is dropped after the requests that use it."""
        former = self.registry.remove(name)
        if former is not None:
            self._drain(former)
            if self.watcher is not None:
                self.watcher.removed(name)
        return former

    @property
    def draining(self) -> dict[str, int]:
        """lora_id of each serving copy that no name maps to any more -> number of requests that still use the copy."""
        return {lora_id: self.registry.num_in_flight(lora_id) for lora_id in self._draining}

    def _answer_all(self) -> None:
        for incoming in self._wire.take():
            self._answer(incoming)

    def _answer(self, incoming: Incoming[MoveName]) -> None:
        try:
            self.move(incoming.request)
        except Exception as error:
            if not isinstance(error, KtError):
                logger.exception("the move of %r failed", incoming.request.name)
            self._wire.answer(incoming, error_reply(incoming.request_id, error))
        else:
            self._wire.answer(incoming, DoneReply(request_id=incoming.request_id))

    def _drain(self, lora_id: str) -> None:
        if lora_id not in self._draining:
            self._draining[lora_id] = asyncio.create_task(self._drop_when_unused(lora_id))

    async def _drop_when_unused(self, lora_id: str) -> None:
        try:
            await self.registry.wait_unused(lora_id)
            if lora_id in self.registry.names().values():
                return  # a name has moved back to this copy
            self._dropping.add(lora_id)
            self.registry.forget(lora_id)
            await self._drop_until_done(lora_id)
        finally:
            self._dropping.discard(lora_id)
            self._draining.pop(lora_id, None)

    async def _drop_until_done(self, lora_id: str) -> None:
        pause_s = FIRST_RETRY_SECONDS
        while True:
            try:
                await self._drop(lora_id)
                return
            except UserError:
                logger.exception("serving copy %s was not dropped", lora_id)
                return
            except KtError as error:
                logger.warning("serving copy %s is not dropped yet, trying again in %g s: %s", lora_id, pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_RETRY_SECONDS)
