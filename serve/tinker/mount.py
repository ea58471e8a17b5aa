"""Adds the Tinker API to the HTTP server, and ends it with the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from kt_runtime.serve.http.adapters import Adapters
from kt_runtime.serve.models.report import ResolvedModel
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.serve.requests.checks.served import UNNAMED
from kt_runtime.serve.tinker.model import ModelFacts
from kt_runtime.serve.tinker.routes import tinker_routes
from kt_runtime.serve.tinker.sampling import Engine
from kt_runtime.serve.tinker.service import TinkerService
from kt_runtime.wire.async_client import AsyncResident

if TYPE_CHECKING:
    from fastapi import FastAPI


@contextlib.asynccontextmanager
async def tinker_api(
    app: FastAPI,
    resident: AsyncResident,
    engine: Engine,
    adapters: Adapters,
    options: ServeOptions,
    model: ResolvedModel,
    context_tokens: int,
    adapter_directory: Path,
) -> AsyncIterator[TinkerService]:
    facts = ModelFacts(
        name=model.name,
        names=sorted({model.name, str(model.directory), options.model, UNNAMED}),
        directory=model.directory,
        family=model.family,
        config=model.config,
        context_tokens=context_tokens,
        any_name=options.any_model_name,
    )
    service = TinkerService(
        resident,
        engine,
        adapters,
        facts,
        adapter_directory,
        reserved={model.name, UNNAMED},
        lost_after_s=options.tinker_timeout_s,
    )
    app.include_router(tinker_routes(service))
    watching = asyncio.create_task(service.watch())
    try:
        yield service
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await service.close()
