"""An exception while a batch is made or computed ends the request at fault; the batch's others are computed again.

SGLang 0.5.23 symbols and reasons; an exception in each of them ends the scheduler process:

- `Req.update_finish_state`: whatever a request's own stop conditions raise ends that request.
- `SchedulerBatchResultProcessor._apply_prefill_grammar`, `._accept_grammar_tokens`: the same for its grammar; SGLang
  expects a ValueError only.
- `SchedulerOutputStreamer.stream_output`: what can't be sent together is sent one by one.
- `Scheduler.get_next_batch_to_run`, `.update_running_batch`, `.run_batch`, `.process_batch_result`: which request is at
  fault is not known here. All that the step was about give back what they hold and join again one at a time (as
  SGLang does it when memory is short: prompt and answer so far are computed again as a prefill). The next joins when a
  prefill alone and a decode step beside the others went well. Where a step fails, whoever joined last is at fault and
  ends; the others go on where they were. Every failure while requests join ends one, and none is in more than
  MOST_FAILURES of them, so that a fault that is nobody's can't keep the server busy.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from kt_runtime.sglang_patch.faults import finite_rows
from kt_runtime.sglang_patch.faults.answers import described, end_request, release_memory, tell_client
from kt_runtime.sglang_patch.hooks import Hooks

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
MOST_FAILURES = 5  # of steps that a request may be in; where faults come without a pattern
SENT = (  # how much of an answer SGLang has sent, in a request
    *("finished_output", "send_token_offset", "send_decode_id_offset"),
    *("input_logprob_sent", "send_output_token_logprobs_offset"),
)
FAILED = object()  # the result of a batch that could not be computed; its requests are out of it already

_suspects: list[Any] = []  # requests of steps that failed, in the waiting queue: each is computed alone next
_failures: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # failed steps that a request was in
_on_trial: Any = None  # the suspect that joined last
_scheduler: Any = None  # of this process, since its first step


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


# What one request is known to be at fault for


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


# Steps of which it is not known


def next_batch(original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """SGLang's plan of the next step. While there are suspects, one at a time is the only request that may begin."""
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
        _on_trial = None  # done, or aborted while it waited
    if _suspects:
        _suspects[:] = [req for req in _suspects if req in waiting]
    if _on_trial is None and _suspects:
        _on_trial = _suspects.pop(0)


def _plan_after_failure(scheduler: Any, running: Any, last: Any, shown: list[Any], error: Exception) -> Any:
    """Whoever was about to begin is suspected; whoever was running goes on, if it is known who that is."""
    from sglang.srt.managers.schedule_batch import NextBatchPlan, ScheduleBatch

    goes_on = running if running.reqs or last is None else last
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    lost = [req for req in (last.reqs if last is not None else ()) if req not in goes_on.reqs]
    failed = [*chunked, *shown, *lost]
    if not failed:
        failed, goes_on = goes_on.reqs, ScheduleBatch(reqs=[], batch_is_full=False)
    if not failed:
        raise error  # no request has anything to do with it
    goes_on.filter_batch(reqs_to_exclude=failed)
    goes_on.batch_is_full = False
    recover(scheduler, failed, error)
    return NextBatchPlan(batch_to_run=None, running_batch=goes_on)


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
        _on_trial = None  # its prefill alone and a step beside others went well


def _take_apart(scheduler: Any, batch: Any, reqs: list[Any], error: Exception) -> None:
    batch.reqs = []
    batch.batch_is_full = False
    recover(scheduler, reqs, error)


def recover(scheduler: Any, reqs: Iterable[Any], error: Exception) -> None:
    """Ends the request at fault: the only one, or the one on trial. The rest become suspects.

    `reqs` must be out of their batch already. Raises where a request's memory can't be told any more.
    """
    global _on_trial
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
    """Back into the queue, as SGLang does it with a request that it retracts for want of memory."""
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
    """A request that was done when the step failed, whose end may not have been sent."""
    release_memory(scheduler, req)
    if not req.finished_output:
        scheduler.output_streamer.stream_output([req], req.return_logprob)
