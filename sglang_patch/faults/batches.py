"""An exception in building or computing a batch ends the request at fault; the batch's other requests are retried.

SGLang 0.5.23 symbols and reasons; an exception in each of them would end the scheduler process:

- `Req.update_finish_state`: an exception from a request's own stop conditions ends this request.
- `SchedulerBatchResultProcessor._apply_prefill_grammar`, `._accept_grammar_tokens`: the same for a request's grammar;
  SGLang handles only ValueError.
- `SchedulerOutputStreamer.stream_output`: if sending all answers together fails, each answer is sent separately.
- `Scheduler.get_next_batch_to_run`, `.update_running_batch`, `.run_batch`, `.process_batch_result`: the request at
  fault is unknown here. All requests of the step release their memory and rejoin one at a time, as after SGLang's
  retraction for lack of memory: a prefill recomputes prompt and answer so far. The next request rejoins after the
  current one has passed a prefill alone and a decode step together with the others. If a step fails, the request that
  rejoined last is at fault and ends; the others resume. Each failure during rejoining ends one request, and no request
  survives more than MOST_FAILURES failures, so that a fault of no particular request can't keep the server busy.
  A lost device ends the server instead (`lost_device.py`): no request could be computed again. So does any failed step
  of several ranks: the others wait for this one within the step.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from kt_runtime import device
from kt_runtime.sglang_patch.faults import finite_rows
from kt_runtime.sglang_patch.faults.answers import described, end_request, release_memory, tell_client
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group

logger = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
SYMBOLS = (
    f"{SCHEDULER}.get_next_batch_to_run",
    f"{SCHEDULER}.update_running_batch",
    f"{SCHEDULER}.run_batch",
    f"{SCHEDULER}.process_batch_result",
    f"{PROCESSOR}._apply_prefill_grammar",
    f"{PROCESSOR}._accept_grammar_tokens",
    "sglang.srt.managers.schedule_batch.Req.update_finish_state",
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
    "sglang.srt.managers.schedule_batch.FINISH_ABORT",
    "sglang.srt.managers.schedule_batch.NextBatchPlan",
    "sglang.srt.managers.schedule_batch.ScheduleBatch",
    f"{SCHEDULER}._pending_chunked_abort_req",
    f"{SCHEDULER}.token_to_kv_pool_allocator",
)
MOST_FAILURES = 5  # failed steps that a request survives, for faults without a pattern
SENT = (  # a request's attributes that count how much of its answer SGLang has sent
    *("finished_output", "send_token_offset", "send_decode_id_offset"),
    *("input_logprob_sent", "send_output_token_logprobs_offset"),
)
FAILED = object()  # the result of a batch that could not be computed; its requests have already been removed

_suspects: list[Any] = []  # requests of failed steps, in the waiting queue; each starts again alone
_failures: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # number of failed steps per request
_on_trial: Any = None  # the suspect that rejoined last
_scheduler: Any = None  # this process's scheduler, set at its first step


def install(hooks: Hooks) -> None:
    plan, decode, run, process, prefill_grammar, accept, finish, stream = SYMBOLS[:8]
    hooks.around(plan, next_batch)
    hooks.around(decode, next_decode_batch)
    hooks.around(run, run_batch)
    hooks.around(process, process_result)
    hooks.around(prefill_grammar, apply_prefill_grammar)
    hooks.around(accept, accept_grammar_tokens)
    hooks.around(finish, update_finish_state)
    hooks.around(stream, stream_output)


# Failures whose request is known


def update_finish_state(original: Callable[..., None], req: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(req, *args, **kwargs)
    except Exception as error:
        logger.exception("request %s ends: its stop conditions failed", req.rid)
        req.finished_reason = _abort(error)
        req.to_finish = None


def apply_prefill_grammar(original: Callable[..., None], processor: Any, *, req: Any, **kwargs: Any) -> None:
    try:
        original(processor, req=req, **kwargs)
    except Exception as error:
        logger.exception("request %s ends: its grammar failed", req.rid)
        req.to_finish = _abort(error)


def accept_grammar_tokens(original: Callable[..., Any], processor: Any, req: Any, tokens: Any) -> Any:
    try:
        return original(processor, req, tokens)
    except Exception as error:
        logger.exception("request %s ends: its grammar failed", req.rid)
        req.to_finish = _abort(error)
        return []


def stream_output(
    original: Callable[..., None], streamer: Any, reqs: list[Any], return_logprob: bool, skip_req: Any = None
) -> None:
    sent = [{name: getattr(req, name) for name in SENT} for req in reqs]
    try:
        original(streamer, reqs, return_logprob, skip_req)
    except Exception:
        logger.exception("the answers of a step could not be sent together")
        for req, values in zip(reqs, sent, strict=True):
            if req is not skip_req:
                vars(req).update(values)
                _stream_one(original, streamer, req, return_logprob)


def _stream_one(original: Callable[..., None], streamer: Any, req: Any, return_logprob: bool) -> None:
    try:
        original(streamer, [req], return_logprob)
    except Exception as error:
        logger.exception("request %s ends: its answer can't be sent", req.rid)
        if _scheduler is not None:
            tell_client(_scheduler, req.rid, described(error), req, HTTPStatus.INTERNAL_SERVER_ERROR)
        req.finished_output = True
        if not req.finished():
            req.to_finish = _abort(error)


def _abort(error: Exception) -> Any:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return FINISH_ABORT(described(error), HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")


# Failed steps whose request at fault is unknown


def next_batch(original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """SGLang's plan of the next step. While there are suspects, only one request may start: the suspect on trial."""
    global _scheduler
    _scheduler = scheduler
    waiting = scheduler.waiting_queue
    _choose_trial(waiting)
    shown, hidden = list(waiting), []
    if _on_trial is not None:
        shown = [req for req in waiting if req is _on_trial and scheduler.chunked_req is None]
        hidden = [req for req in waiting if req not in shown]
        scheduler.waiting_queue = list(shown)
    try:
        return original(scheduler, running_batch=running_batch, last_batch=last_batch)
    except Exception as error:  # noqa: BLE001 - logged by `recover`
        return _plan_after_failure(scheduler, running_batch, last_batch, shown, error)
    finally:
        if hidden:
            scheduler.waiting_queue = [*scheduler.waiting_queue, *hidden]


def _choose_trial(waiting: list[Any]) -> None:
    global _on_trial
    if _on_trial is not None and (_on_trial.finished() or not (_on_trial in waiting or _on_trial.kv.holds_kv)):
        _on_trial = None  # finished, or aborted while it waited
    if _suspects:
        _suspects[:] = [req for req in _suspects if req in waiting]
    if _on_trial is None and _suspects:
        _on_trial = _suspects.pop(0)


def _plan_after_failure(scheduler: Any, running: Any, last: Any, shown: list[Any], error: Exception) -> Any:
    """The requests that were about to start become suspects. Running requests continue, if they can be identified."""
    from sglang.srt.managers.schedule_batch import NextBatchPlan, ScheduleBatch

    continuing = running if running.reqs or last is None else last
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    lost = [req for req in (last.reqs if last is not None else ()) if req not in continuing.reqs]
    failed = [*chunked, *shown, *lost]
    if not failed:
        failed, continuing = continuing.reqs, ScheduleBatch(reqs=[], batch_is_full=False)
    if not failed:
        raise error  # the failure involves no request
    continuing.filter_batch(reqs_to_exclude=failed)
    continuing.batch_is_full = False
    recover(scheduler, failed, error)
    return NextBatchPlan(batch_to_run=None, running_batch=continuing)


def next_decode_batch(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    reqs = list(batch.reqs)
    try:
        return original(scheduler, batch)
    except Exception as error:  # noqa: BLE001 - logged by `recover`
        _take_apart(scheduler, batch, reqs, error)
        return batch


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        result = original(scheduler, batch, *args, **kwargs)
        finite_rows.mark_requests(scheduler, batch)
        return result
    except Exception as error:  # noqa: BLE001 - logged by `recover`
        finite_rows.forget()
        _take_apart(scheduler, batch, batch.reqs, error)
        return FAILED


def process_result(original: Callable[..., None], scheduler: Any, batch: Any, result: Any) -> None:
    global _on_trial
    if result is FAILED:
        return
    reqs = list(batch.reqs)
    try:
        original(scheduler, batch, result)
    except Exception as error:  # noqa: BLE001 - logged by `recover`
        _take_apart(scheduler, batch, reqs, error)
        return
    if _on_trial in reqs and batch.forward_mode.is_decode():
        _on_trial = None  # its prefill alone and a decode step together with others succeeded


def _take_apart(scheduler: Any, batch: Any, reqs: list[Any], error: Exception) -> None:
    batch.reqs = []
    batch.batch_is_full = False
    recover(scheduler, reqs, error)


def recover(scheduler: Any, reqs: Iterable[Any], error: Exception) -> None:
    """Ends the request at fault: the only request, or the one on trial. The others become suspects.

    `reqs` must have been removed from their batch. Raises if a request's memory can't be determined any more, and
    `error` if the device is lost or there are several ranks.
    """
    global _on_trial
    if device.is_lost(error) or group.num_ranks() > 1:
        raise error
    unique = list({id(req): req for req in reqs}.values())
    logger.error("a step failed; its requests are %s", [req.rid for req in unique], exc_info=error)
    allocator = scheduler.token_to_kv_pool_allocator
    if allocator.free_group is not None:
        allocator.free_group_end()
    for req in unique:
        _failures[req] = _failures.get(req, 0) + 1
        is_at_fault = len(unique) == 1 or req is _on_trial
        if req.finished():
            _send_end(scheduler, req)
        elif is_at_fault or _failures[req] > MOST_FAILURES or req.input_embeds is not None:
            end_request(scheduler, req, described(error))
        else:
            _suspect(scheduler, req)
    if any(req is _on_trial for req in unique):
        _on_trial = None


def _suspect(scheduler: Any, req: Any) -> None:
    """Puts the request back into the waiting queue, as SGLang does when it retracts a request for lack of memory."""
    if scheduler.chunked_req is req:
        scheduler.chunked_req = None
    if scheduler._pending_chunked_abort_req is req:
        scheduler._pending_chunked_abort_req = None
    _suspects.append(req)
    has_begun = req.kv.holds_kv
    release_memory(scheduler, req)
    if has_begun:
        req.reset_for_retract()
    if req not in scheduler.waiting_queue:
        scheduler._add_request_to_queue(req, is_retracted=has_begun)


def _send_end(scheduler: Any, req: Any) -> None:
    """Frees a request that was finished when the step failed, and sends its end if that was not sent yet."""
    release_memory(scheduler, req)
    if not req.finished_output:
        scheduler.output_streamer.stream_output([req], req.return_logprob)
