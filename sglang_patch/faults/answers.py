"""How a request ends that an exception in the scheduler process belongs to: what it held is freed, its client told.

Symbols (SGLang 0.5.23): `managers.io_struct.AbortReq`, with which the scheduler ends a request outside its output
stream; `mem_cache.common.release_kv_cache`; the answers to control requests in `managers.io_struct`, which are named
after the requests. Reason: SGLang has no such end; an exception in its loop ends the process.
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
    """What the client is told. An exception that is not made for users may hold anything: the log has its text."""
    if isinstance(error, KtError):
        return str(error)
    return f"the server failed at this request ({type(error).__name__}); its log says why"


def status_of(error: BaseException) -> HTTPStatus:
    return HTTPStatus.NOT_FOUND if isinstance(error, NotFoundError) else HTTPStatus.INTERNAL_SERVER_ERROR


def tell_client(scheduler: Any, rid: str, message: str, route: Any, status: HTTPStatus) -> None:
    """`route`: SGLang's request, or the message it came in; says which frontend waits for the answer."""
    from sglang.srt.managers.io_struct import AbortReq

    reason = {"type": "abort", "message": message, "status_code": int(status), "err_type": _kind(status)}
    scheduler.send_abort_output(AbortReq(rid=rid, finished_reason=reason), route)


def _kind(status: HTTPStatus) -> str:
    return "BadRequestError" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "InternalServerError"


def end_request(scheduler: Any, req: Any, message: str, status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR) -> None:
    """Ends a request that the scheduler has, wherever it is: nothing of it is kept, and nothing reaches the cache.

    The batches that hold it must be told to leave it out (`ScheduleBatch.filter_batch` does, since it is finished).
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
    """Takes requests out of the queues of those that have not begun."""
    gone = {id(req) for req in requests}
    scheduler.waiting_queue = [req for req in scheduler.waiting_queue if id(req) not in gone]
    grammars = scheduler.grammar_manager
    for req in grammars.grammar_queue:
        if id(req) in gone and hasattr(req.grammar, "cancel"):
            req.grammar.cancel()
    grammars.grammar_queue = [req for req in grammars.grammar_queue if id(req) not in gone]


def release_memory(scheduler: Any, req: Any) -> None:
    """KV slots, row of the request pool and lock in the prefix cache; what was computed is not kept."""
    from sglang.srt.mem_cache.common import release_kv_cache

    if req.kv.holds_kv and req.kv.kv_allocated_len > 0:
        req.kv.kv_committed_len = req.kv.kv_allocated_len  # an exception may come between the two
        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
        return
    if req.kv.holds_kv:
        scheduler.req_to_token_pool.free(req)
    if req.lock is not None:
        scheduler.tree_cache.unlock(req.lock)
        req.lock = None


def failure_of(request: Any, error: BaseException) -> Any:
    """SGLang's answer to a control request, saying that it failed; None for a request that has no answer.

    A field `success` (or `updated`) is False, `message` and `error_message` say why. What the request names too is the
    request's: its sender is found by `session_id`. Others are empty.
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
