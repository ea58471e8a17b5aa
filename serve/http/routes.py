"""The routes that kt-runtime adds to SGLang's HTTP server, all under `/kt`. docs/http.md describes them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from kt_runtime.errors import (
    ConflictError,
    InvalidValueError,
    KtError,
    LimitError,
    NotFoundError,
    RequestTimeoutError,
    ServerBusyError,
    ServerUnreachableError,
    UnknownNameError,
    UserError,
)
from kt_runtime.serve.http.adapters import Adapters
from kt_runtime.serve.http.cache_clearing import CacheClearing
from kt_runtime.serve.http.settings import RunningSettings

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024

# The first matching class applies.
STATUS_OF_ERROR: tuple[tuple[type[KtError], int], ...] = (
    (UnknownNameError, 404),
    (NotFoundError, 404),
    (ConflictError, 409),
    (LimitError, 429),
    (UserError, 400),
    (ServerUnreachableError, 503),
    (RequestTimeoutError, 503),
    (ServerBusyError, 503),
    (KtError, 500),
)


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str
    take_over: bool = False


class RollbackBody(msgspec.Struct, forbid_unknown_fields=True):
    version: str | None = None


_B = TypeVar("_B", LoadBody, RollbackBody, dict[str, Any])


def adapter_routes(adapters: Adapters) -> APIRouter:
    router = APIRouter(prefix="/kt", tags=["kt-runtime"])

    @router.get("/status")
    async def status(verify: bool = False) -> JSONResponse:
        return await _answer(lambda: adapters.status(verify))

    @router.get("/adapters")
    async def list_adapters() -> JSONResponse:
        async def listed() -> dict[str, Any]:
            return {"adapters": await adapters.list_all()}

        return await _answer(listed)

    @router.post("/adapters")
    async def load(request: Request) -> JSONResponse:
        async def loaded() -> dict[str, Any]:
            body = await _body(request, LoadBody)
            return await adapters.load(body.name, body.path, take_over=body.take_over)

        return await _answer(loaded)

    @router.get("/adapters/{name}")
    async def show(name: str) -> JSONResponse:
        return await _answer(lambda: adapters.show(name))

    @router.post("/adapters/{name}/rollback")
    async def rollback(name: str, request: Request) -> JSONResponse:
        async def rolled_back() -> dict[str, Any]:
            body = await _body(request, RollbackBody)
            return await adapters.rollback(name, body.version)

        return await _answer(rolled_back)

    @router.delete("/adapters/{name}")
    async def unload(name: str) -> JSONResponse:
        return await _answer(lambda: adapters.unload(name))

    return router


def registry_routes(adapters: Adapters) -> APIRouter:
    router = APIRouter(prefix="/kt/registry", tags=["kt-runtime"])

    @router.get("")
    async def show() -> JSONResponse:
        async def shown() -> dict[str, Any]:
            if adapters.registry is None:
                raise ConflictError("this server has no registry; start it with --registry DIR|URL")
            return adapters.registry()

        return await _answer(shown)

    return router


def settings_routes(settings: RunningSettings) -> APIRouter:
    router = APIRouter(prefix="/kt/settings", tags=["kt-runtime"])

    @router.get("")
    async def show() -> JSONResponse:
        return await _answer(lambda: settings.change({}))

    @router.patch("")
    async def change(request: Request) -> JSONResponse:
        async def changed() -> dict[str, Any]:
            return await settings.change(await _body(request, dict[str, Any]))

        return await _answer(changed)

    return router


def cache_routes(clearing: CacheClearing) -> APIRouter:
    router = APIRouter(prefix="/kt/cache", tags=["kt-runtime"])

    @router.post("/clear")
    async def clear() -> JSONResponse:
        return await _answer(clearing.clear)

    return router


async def _body(request: Request, body_type: type[_B]) -> _B:
    """The parsed JSON body; an empty body counts as {}."""
    received = b""
    async for part in request.stream():
        received += part
        if len(received) > MAX_BODY_BYTES:
            raise InvalidValueError(f"the request's body is larger than {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(received or b"{}", type=body_type)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"the request's body: {error}") from None


async def _answer(work: Callable[[], Awaitable[dict[str, Any]]]) -> JSONResponse:
    try:
        return JSONResponse(await work())
    except KtError as error:
        status = next(status for kind, status in STATUS_OF_ERROR if isinstance(error, kind))
        return _error(status, type(error).__name__, str(error))
    except Exception as error:  # the boundary: a bug becomes a logged error answer
        logger.exception("a /kt route failed")
        return _error(500, "RuntimeFault", f"unexpected {type(error).__name__}; the server's log has it")


def _error(status: int, kind: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "kind": kind}}, status_code=status)
