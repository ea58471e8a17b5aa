"""Ends a request after an exception in the scheduler process: frees the request's resources and informs its client.

Symbols (SGLang 0.5.23): `managers.io_struct.AbortReq`, with which the scheduler ends a request outside its output
stream; `mem_cache.common.release_kv_cache`; the answers to control requests in `managers.io_struct`, whose names derive
from the requests' names. Reason: SGLang can't end a single request; an exception in its loop ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec

from kt_runtime.errors import KtError, NotFoundError

SYMBOLS = (
    "sglang.srt.managers.io_struct.AbortReq",
    "sglang.srt.managers.io_struct.LoRAUpdateOutput",
    "sglang.srt.managers.scheduler.Scheduler._release_aborted_request",
    "sglang.srt.managers.scheduler.Scheduler.grammar_manager",
    "sglang.srt.managers.scheduler.Scheduler.send_abort_output",
    "sglang.srt.managers.scheduler.Scheduler.send_control_output",
    "sglang.srt.mem_cache.common.release_kv_cache",
)


def described(error: BaseException) -> str:
    """The message for the client: a KtError's own text. Other errors' text may hold anything and is only logged."""
    if isinstance(error, KtError):
        return str(error)
    return f"the server failed at this request ({type(error).__name__}); its log says why"


def status_of(error: BaseException) -> HTTPStatus:
    return HTTPStatus.NOT_FOUND if isinstance(error, NotFoundError) else HTTPStatus.INTERNAL_SERVER_ERROR


def tell_client(scheduler: Any, rid: str, message: str, route: Any, status: HTTPStatus) -> None:
    """Sends an error answer. `route`: SGLang's request or its message, which identifies the waiting frontend."""
    from sglang.srt.managers.io_struct import AbortReq

    reason = {"type": "abort", "message": message, "status_code": int(status), "err_type": _kind(status)}
    scheduler.send_abort_output(AbortReq(rid=rid, finished_reason=reason), route)


def _kind(status: HTTPStatus) -> str:
    return "BadRequestError" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "InternalServerError"


def end_request(scheduler: Any, req: Any, message: str, status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR) -> None:
    """Ends a request in any state. Its memory is freed, and none of its KV enters the prefix cache.

    The caller must remove the request from its batches (`ScheduleBatch.filter_batch` removes finished requests).
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    forget_waiting(scheduler, [req])
    if scheduler.chunked_req is req:
        scheduler.chunked_req = None
    if scheduler._pending_chunked_abort_req is req:
        scheduler._pending_chunked_abort_req = None
    scheduler._release_aborted_request(req)
    release_memory(scheduler, req)
    if not req.finished():
        req.finished_reason = FINISH_ABORT(message, status, _kind(status))
    req.to_finish = None
    tell_client(scheduler, req.rid, message, req, status)


def forget_waiting(scheduler: Any, requests: Iterable[Any]) -> None:
    """Removes requests from the waiting queue and from the grammar queue, and cancels their grammars."""
    gone = {id(req) for req in requests}
    scheduler.waiting_queue = [req for req in scheduler.waiting_queue if id(req) not in gone]
    grammars = scheduler.grammar_manager
    for req in grammars.grammar_queue:
        if id(req) in gone and hasattr(req.grammar, "cancel"):
            req.grammar.cancel()
    grammars.grammar_queue = [req for req in grammars.grammar_queue if id(req) not in gone]


def release_memory(scheduler: Any, req: Any) -> None:
    """Frees KV slots, request pool row and prefix cache lock. Computed KV is not inserted into the cache."""
    from sglang.srt.mem_cache.common import release_kv_cache

    if req.kv.holds_kv and req.kv.kv_allocated_len > 0:
        req.kv.kv_committed_len = req.kv.kv_allocated_len  # an exception may have left the two lengths unequal
        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
        return
    if req.kv.holds_kv:
        scheduler.req_to_token_pool.free(req)
    if req.lock is not None:
        scheduler.tree_cache.unlock(req.lock)
        req.lock = None


def failure_of(request: Any, error: BaseException) -> Any:
    """SGLang's answer that reports the failure of a control request; None for a request that has no answer.

    `success` (or `updated`) is False; `message` and `error_message` have the reason. Fields that the request also has
    are copied from the request: SGLang finds the sender by `session_id`. All other fields are empty.
    """
    answer = _answer_type(type(request).__name__)
    if answer is None:
        return None
    values = {
        field.name: getattr(request, field.name, None) or _empty(field, described(error))
        for field in msgspec.structs.fields(answer)
        if field.required or field.name in _MESSAGES
    }
    return answer(**values)


_MESSAGES = ("message", "error_message", "error")


def _answer_type(request: str) -> Any:
    from sglang.srt.managers import io_struct

    if "LoRAAdapter" in request:
        return io_struct.LoRAUpdateOutput
    for name in (request.removesuffix("Input") + "Output", request + "Output"):
        if hasattr(io_struct, name):
            return getattr(io_struct, name)
    return None


def _empty(field: Any, message: str) -> Any:
    if field.name in _MESSAGES:
        return message
    for kind, value in ((bool, False), (int, 0), (float, 0.0), (str, "")):
        if field.type is kind:
            return value
    origin = getattr(field.type, "__origin__", None)
    return origin() if origin in (dict, list) else None
