"""The routes of the Tinker API. Bodies are JSON, or protobuf for training calls; protobuf may be compressed with zstd.

An error of a request that has a place in a run's order is a failed future, so that later requests of the run are
taken. Other errors are answers {"detail": ...} with a status that makes the SDK raise at once (400, 404, 410), or try
again (429, 503).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
import zstandard
from fastapi import APIRouter, Request
from fastapi.responses import Response

from kt_runtime.errors import (
    InvalidValueError,
    KtError,
    NotFoundError,
    ServerBusyError,
    UnknownNameError,
    UserError,
)
from kt_runtime.serve.http.route_table import TRAINING_BODY_BYTES
from kt_runtime.serve.requests.checks.middleware import TOO_LARGE, TooLarge
from kt_runtime.serve.tinker.futures import Failure, Future
from kt_runtime.serve.tinker.protocol import bodies
from kt_runtime.serve.tinker.protocol.batches import TrainingCall, call_from_json, call_from_protobuf
from kt_runtime.serve.tinker.protocol.places import place_of_call
from kt_runtime.serve.tinker.protocol.results import SampleResult
from kt_runtime.serve.tinker.service import TinkerService
from kt_runtime.serve.tinker.training import SMALL_BYTES

logger = logging.getLogger(__name__)

PREFIX = "/api/v1"
PROTOBUF = "application/x-protobuf"
POLL_SECONDS = 30.0  # the SDK gives up after 45
VERSION_HEADER = "X-KT-Adapter-Version"
STATUS_OF_ERROR: tuple[tuple[type[Exception], int], ...] = (
    (NotFoundError, 404),
    (UnknownNameError, 404),
    (ServerBusyError, 429),
    (UserError, 400),
    (KtError, 503),
)
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
    "sample_max_concurrent_requests": 1024,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
}
NO_DOWNLOAD = (
    "weights are not exported through this API; `kt-runtime adapter export` writes them on the server's machine"
)

_B = TypeVar("_B")
Handler = Callable[..., Awaitable[Response]]


def tinker_routes(service: TinkerService) -> APIRouter:
    router = APIRouter(prefix=PREFIX, tags=["tinker"])
    _add_session_routes(router, service)
    _add_training_routes(router, service)
    _add_sampling_routes(router, service)
    _add_listing_routes(router, service)
    return router


def _add_session_routes(router: APIRouter, service: TinkerService) -> None:
    @router.post("/client/config")
    async def client_config() -> Response:
        return _json(CLIENT_CONFIG)

    @router.post("/client/dynamic_config")
    async def dynamic_config() -> Response:
        return _json({"refresh_interval_sec": 3600, "sample_cancel_enabled": False})

    @router.get("/healthz")
    async def health() -> Response:
        return _json({"status": "ok"})

    @router.post("/telemetry")
    async def telemetry() -> Response:
        return _json({"status": "accepted"})

    @router.get("/get_server_capabilities")
    async def capabilities() -> Response:
        model = service.model
        known = {"max_context_length": model.context_tokens, "trainable": True, "sampleable": True}
        return _json({"supported_models": [{"model_name": model.name, **known}]})

    @router.post("/create_session")
    @_answering
    async def create_session(request: Request) -> Response:
        await _body(request, bodies.CreateSession)
        return _json(service.create_session(request.headers.get("x-idempotency-key")))

    @router.post("/session_heartbeat")
    @_answering
    async def heartbeat(request: Request) -> Response:
        session = (await _body(request, bodies.SessionHeartbeat)).session_id
        if not service.sessions.is_open(session):
            return _error(410, f"session {session!r} has ended")
        service.sessions.touch(session)
        return _json({"type": "session_heartbeat"})

    @router.post("/sessions/{session}/finish")
    async def finish(session: str) -> Response:
        service.finish_session(session)
        return _json(None)


def _add_training_routes(router: APIRouter, service: TinkerService) -> None:
    _add_opening_route(router, "/create_model", bodies.CreateModel, service.create_model)
    _add_opening_route(router, "/unload_model", bodies.OfModel, lambda body: service.unload_model(body.model_id))
    _add_opening_route(router, "/optim_step", bodies.OptimStep, service.optim_step)
    _add_opening_route(router, "/save_weights", bodies.SaveWeights, service.save_weights)
    _add_opening_route(
        router,
        "/save_weights_external",
        bodies.SaveWeights,
        lambda body: service.refuse_call(body.model_id, body.seq_id, NO_DOWNLOAD),
    )
    _add_opening_route(router, "/save_weights_for_sampler", bodies.SaveWeightsForSampler, service.save_for_sampler)

    @router.post("/get_info")
    @_answering
    async def info(request: Request) -> Response:
        return _json(service.info((await _body(request, bodies.OfModel)).model_id))

    @router.post("/forward_backward")
    @_answering
    async def forward_backward(request: Request) -> Response:
        return await _forward(service, request, forward_only=False)

    @router.post("/forward")
    @_answering
    async def forward(request: Request) -> Response:
        return await _forward(service, request, forward_only=True)

    @router.post("/load_weights")
    @_answering
    async def load(request: Request) -> Response:
        body = await _body(request, bodies.LoadWeights)
        if (body.model_id is None) == (body.session_id is None):
            raise InvalidValueError("load_weights needs either model_id, or session_id and model_seq_id")
        return _opened(service.load_new_run(body) if body.model_id is None else service.load_into_run(body))

    @router.post("/retrieve_future")
    @_answering
    async def retrieve(request: Request) -> Response:
        request_id = (await _body(request, bodies.RetrieveFuture)).request_id
        future = service.futures.get(request_id)
        if future is None:
            return _error(410, f"request {request_id!r} is not known: it is too old, or the server was restarted")
        if not await service.futures.wait(future, POLL_SECONDS):
            return _json({"type": "try_again", "request_id": request_id, "queue_state": "active"})
        return _outcome(future, takes_protobuf=PROTOBUF in request.headers.get("accept", ""))


def _add_sampling_routes(router: APIRouter, service: TinkerService) -> None:
    @router.post("/create_sampling_session")
    @_answering
    async def create(request: Request) -> Response:
        return _json(await service.samplers.create_sampler(await _body(request, bodies.CreateSamplingSession)))

    @router.get("/samplers/{sampler}")
    @_answering
    async def show(sampler: str) -> Response:
        return _json(service.samplers.sampler(sampler))

    _add_opening_route(router, "/asample", bodies.Sample, service.samplers.sample)


def _add_listing_routes(router: APIRouter, service: TinkerService) -> None:
    listing = service.listing

    @router.get("/training_runs")
    @_answering
    async def runs(limit: int = 20, offset: int = 0) -> Response:
        return _json(await listing.training_runs(*_page(limit, offset)))

    @router.get("/training_runs/{run}")
    @_answering
    async def run(run: str) -> Response:
        return _json(await listing.training_run(run))

    @router.get("/training_runs/{run}/checkpoints")
    @_answering
    async def checkpoints(run: str) -> Response:
        return _json(await listing.checkpoints_of(run))

    @router.get("/checkpoints")
    @_answering
    async def all_checkpoints(limit: int = 100, offset: int = 0) -> Response:
        return _json(await listing.all_checkpoints(*_page(limit, offset)))

    @router.delete("/training_runs/{run}/checkpoints/{checkpoint:path}")
    @_answering
    async def delete(run: str, checkpoint: str) -> Response:
        await listing.delete_checkpoint(run, checkpoint)
        return _json(None)

    @router.post("/weights_info")
    @_answering
    async def weights_info(request: Request) -> Response:
        return _json(await listing.weights_info((await _body(request, bodies.OfPath)).tinker_path))


def _add_opening_route(router: APIRouter, path: str, body_type: type[_B], begin: Callable[[_B], Future]) -> None:
    """The route answers the id of the future that `begin` opens. Clients fetch the result by `retrieve_future`."""

    @router.post(path)
    @_answering
    async def opened(request: Request) -> Response:
        return _opened(begin(await _body(request, body_type)))


def _page(limit: int, offset: int) -> tuple[int, int]:
    return min(max(limit, 0), 1000), max(offset, 0)


def _answering(handler: Handler) -> Handler:
    """Answers the handler's errors. `functools.wraps` keeps the signature, which FastAPI reads."""

    @functools.wraps(handler)
    async def answer(*arguments: Any, **named: Any) -> Response:
        try:
            return await handler(*arguments, **named)
        except KtError as error:
            status = next(status for kind, status in STATUS_OF_ERROR if isinstance(error, kind))
            return _error(status, str(error))
        except Exception as error:  # the boundary: a bug becomes a logged error answer
            logger.exception("a route of the Tinker API failed")
            return _error(500, f"unexpected {type(error).__name__}; the server's log has it")

    return answer


async def _body(request: Request, body_type: type[_B]) -> _B:
    return bodies.decoded(await _content(request), body_type)


async def _forward(service: TinkerService, request: Request, *, forward_only: bool) -> Response:
    """A body that can't be read, or is too large, fails in its place in the run's order, if it says which: without
    that, the run's later calls would wait for it."""
    too_large: TooLarge | None = request.scope.get(TOO_LARGE)
    try:
        if too_large is not None:
            raise InvalidValueError(f"{too_large.message}; send fewer or shorter data at once")
        call = await _training_call(request, forward_only=forward_only)
    except InvalidValueError as error:
        content = b"" if too_large is not None else await request.body()
        head, tail = (too_large.head, too_large.tail) if too_large is not None else (content, content)
        place = place_of_call(
            head,
            tail,
            is_protobuf=request.headers.get("content-type", "").startswith(PROTOBUF),
            is_zstd=_is_zstd(request),
        )
        if place is not None:
            return _opened(service.refuse_call(place.model_id, place.seq_id, str(error)))
        if too_large is not None:
            return _error(413, str(error))
        raise
    return _opened(service.forward(call))


async def _training_call(request: Request, *, forward_only: bool) -> TrainingCall:
    content = await _content(request)
    if request.headers.get("content-type", "").startswith(PROTOBUF):
        read: Callable[[], TrainingCall] = lambda: call_from_protobuf(content)  # noqa: E731
    else:
        read = functools.partial(call_from_json, content, forward_only=forward_only)
    return await asyncio.to_thread(read) if len(content) > SMALL_BYTES else read()


async def _content(request: Request) -> bytes:
    """The body, decompressed. The middleware has bounded it (`serve/requests/checks/body_reader.py`)."""
    content = await request.body()
    return await asyncio.to_thread(decompressed, content, TRAINING_BODY_BYTES) if _is_zstd(request) else content


def _is_zstd(request: Request) -> bool:
    return request.headers.get("content-encoding", "").strip().lower() == "zstd"


def decompressed(content: bytes, most_bytes: int) -> bytes:
    """Raises InvalidValueError for broken zstd, and for more than `most_bytes`; memory stays below that, too."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(content) as reader:
            found = reader.read(most_bytes + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise InvalidValueError(f"Content-Encoding: the body is no zstd: {error}") from None
    if len(found) > most_bytes:
        raise InvalidValueError(f"the body has more than {most_bytes} bytes when decompressed")
    return found


def _opened(future: Future) -> Response:
    return _json({"request_id": future.request_id, **future.facts})


def _outcome(future: Future, *, takes_protobuf: bool) -> Response:
    outcome = future.outcome
    assert outcome is not None
    if isinstance(outcome, Failure):
        return _json({"error": outcome.message, "category": outcome.category})
    headers = {VERSION_HEADER: outcome.adapter_version} if isinstance(outcome, SampleResult) else None
    message = outcome.protobuf() if takes_protobuf else None
    if message is not None:
        return Response(message, media_type=PROTOBUF, headers=headers)
    return _json(outcome.json(), headers=headers)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json", headers=headers)


def _error(status: int, message: str) -> Response:
    return _json({"detail": message}, status)
