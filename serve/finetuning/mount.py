"""Adds the fine-tuning API to the HTTP server, and ends it with the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kt_runtime.errors import KtError
from kt_runtime.serve.finetuning.files import FileStore
from kt_runtime.serve.finetuning.jobs import JobStore
from kt_runtime.serve.finetuning.queue import JobQueue
from kt_runtime.serve.finetuning.recipe import ServerFacts
from kt_runtime.serve.finetuning.routes import finetuning_routes, switched_off_routes
from kt_runtime.serve.finetuning.service import FineTuning
from kt_runtime.serve.finetuning.trainer import Connection
from kt_runtime.serve.http.adapters import Adapters
from kt_runtime.serve.requests.checks.served import ServedModels
from kt_runtime.wire.async_client import AsyncResident

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.3


@contextlib.asynccontextmanager
async def finetuning_api(
    app: FastAPI,
    resident: AsyncResident,
    adapters: Adapters,
    models: ServedModels,
    facts: ServerFacts,
    connection: Connection,
    adapter_directory: Path,
    root: Path | None,
) -> AsyncIterator[FineTuning | None]:
    """`root`: the locked directory of files and jobs, None: the API is switched off."""
    if root is None:
        app.include_router(switched_off_routes())
        yield None
        return
    files, jobs = await asyncio.to_thread(FileStore, root / "files"), await asyncio.to_thread(JobStore, root)
    for problem in (*files.unreadable, *jobs.unreadable):
        logger.error("fine-tuning: a record can't be read: %s", problem)

    async def is_ready() -> None:
        await _answers(connection.url, adapters)

    queue = JobQueue(jobs, files, adapters, resident, facts, adapter_directory, connection, is_ready)
    service = FineTuning(files, jobs, queue, models)
    app.include_router(finetuning_routes(service))
    queue.start()
    try:
        yield service
    finally:
        await queue.close()


async def _answers(url: str, adapters: Adapters) -> None:
    """Waits until the server listens and serves the adapters of an earlier run: a job may continue from one."""
    parts = urlsplit(url)
    while True:
        with contextlib.suppress(OSError, KtError):
            if not (await adapters.status())["restoring"]:
                _, writer = await asyncio.open_connection(parts.hostname, parts.port)
                writer.close()
                return
        await asyncio.sleep(POLL_SECONDS)
