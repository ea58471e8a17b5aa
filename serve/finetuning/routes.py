"""The routes of OpenAI's fine-tuning API. Errors are {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from kt_runtime.errors import KtError, NotFoundError, ServerBusyError, UnknownNameError, UserError
from kt_runtime.serve.finetuning.protocol import bodies
from kt_runtime.serve.finetuning.service import FineTuning
from kt_runtime.serve.requests.bodies.bounds import Body
from kt_runtime.serve.requests.checks.checking import parse_query, parsed
from kt_runtime.serve.requests.checks.refusal import Refusal, answer

logger = logging.getLogger(__name__)

FILES, JOBS = "/v1/files", "/v1/fine_tuning/jobs"
OFF = "this server has no fine-tuning API: it was started with --finetuning-dir off"
STATUS_OF_ERROR: tuple[tuple[type[Exception], int], ...] = (
    (NotFoundError, 404),
    (UnknownNameError, 404),
    (UserError, 400),  # a conflict, too: OpenAI's client would send the request again after 409
    (ServerBusyError, 503),
    (KtError, 500),
)

_Q = TypeVar("_Q", bound=Body)
Handler = Callable[..., Awaitable[Response]]


def finetuning_routes(service: FineTuning) -> APIRouter:
    router = APIRouter(tags=["fine-tuning"])
    _add_files(router, service)
    _add_jobs(router, service)
    return router


def switched_off_routes() -> APIRouter:
    router = APIRouter(tags=["fine-tuning"])

    async def refuse(request: Request) -> Response:
        return _refused(Refusal(403, OFF), request)

    for place in (FILES, JOBS):
        for path in (place, f"{place}/{{rest:path}}"):
            router.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"])
    return router


def _add_files(router: APIRouter, service: FineTuning) -> None:
    @router.post(FILES)
    async def upload(request: Request) -> Response:
        """The middleware answers errors: it reads on, so that a client that still sends gets the answer."""
        try:
            return JSONResponse(await service.upload(request.headers.get("content-type", ""), request.stream()))
        except (KtError, OSError) as error:
            raise _refusal_of(error) from error

    @router.get(FILES)
    @_answering
    async def list_files(request: Request) -> Response:
        return JSONResponse(service.list_files(_query(request, bodies.FilesQuery)[0]))

    @router.get(f"{FILES}/{{file}}")
    @_answering
    async def show(request: Request, file: str) -> Response:
        return JSONResponse(service.file(file))

    @router.get(f"{FILES}/{{file}}/content")
    @_answering
    async def content(request: Request, file: str) -> Response:
        path, name = service.content(file)
        return FileResponse(path, media_type="application/octet-stream", filename=name)

    @router.delete(f"{FILES}/{{file}}")
    @_answering
    async def delete(request: Request, file: str) -> Response:
        return JSONResponse(await service.delete_file(file))


def _add_jobs(router: APIRouter, service: FineTuning) -> None:
    @router.post(JOBS)
    @_answering
    async def create(request: Request) -> Response:
        body, _ = parsed(await request.body(), bodies.CreateJob)
        return JSONResponse(await service.create(body))

    @router.get(JOBS)
    @_answering
    async def list_jobs(request: Request) -> Response:
        return JSONResponse(service.list_jobs(*_query(request, bodies.PageQuery)))

    @router.get(f"{JOBS}/{{job}}")
    @_answering
    async def show(request: Request, job: str) -> Response:
        return JSONResponse(service.job(job))

    @router.post(f"{JOBS}/{{job}}/cancel")
    @_answering
    async def cancel(request: Request, job: str) -> Response:
        return JSONResponse(await service.cancel(job))

    @router.get(f"{JOBS}/{{job}}/events")
    @_answering
    async def events(request: Request, job: str) -> Response:
        return JSONResponse(await service.events(job, _query(request, bodies.PageQuery)[0]))

    @router.get(f"{JOBS}/{{job}}/checkpoints")
    @_answering
    async def checkpoints(request: Request, job: str) -> Response:
        return JSONResponse(service.checkpoints(job, _query(request, bodies.PageQuery)[0]))


def _answering(handler: Handler) -> Handler:
    """Answers the handler's errors. `functools.wraps` keeps the signature, which FastAPI reads."""

    @functools.wraps(handler)
    async def answered(request: Request, **named: Any) -> Response:
        try:
            return await handler(request, **named)
        except Refusal as refusal:
            return _refused(refusal, request)
        except (KtError, OSError) as error:
            return _refused(_refusal_of(error), request)
        except Exception as error:  # the boundary: a bug becomes a logged error answer
            logger.exception("a route of the fine-tuning API failed")
            return _refused(Refusal(500, f"unexpected {type(error).__name__}; the server's log has it"), request)

    return answered


def _refusal_of(error: KtError | OSError) -> Refusal:
    if isinstance(error, KtError):
        return Refusal(next(status for kind, status in STATUS_OF_ERROR if isinstance(error, kind)), str(error))
    logger.error("the fine-tuning API can't read or write", exc_info=error)
    return Refusal(500, f"the server's disk: {error.strerror or error}")


def _refused(refusal: Refusal, request: Request) -> Response:
    return Response(answer(refusal, request.url.path), refusal.status, media_type="application/json")


def _query(request: Request, query_type: type[_Q]) -> tuple[_Q, dict[str, str]]:
    """The query, and the values of `metadata[NAME]`. Raises Refusal."""
    pairs = parse_qsl(request.url.query, keep_blank_values=True)
    metadata = {
        name.removeprefix("metadata[").removesuffix("]"): value
        for name, value in pairs
        if name.startswith("metadata[") and name.endswith("]")
    }
    rest = [(name, value) for name, value in pairs if not name.startswith("metadata[")]
    return parse_query(urlencode(rest).encode(), query_type), metadata
