"""An exception while the scheduler receives a request ends this request, not the process.

Symbols (SGLang 0.5.23) and reasons; an exception in each of them would end the scheduler process:

- `request_receiver.sock_recv`: a message can't be decoded. `SchedulerRequestReceiver.unwrap_pickle_wrapper`: a
  message's fields can't be decoded.
- `Scheduler.process_input_requests`: an exception is answered for the message that was being handled. A generating
  request gets an error, a control request gets SGLang's own answer for a failure.
- `Scheduler.handle_generate_request`, `.handle_embedding_request`: the same for each request of a batch. A new request
  is tried immediately, so that it can't fail in a later batch: its sampling parameters are converted to SGLang's
  tensors as in a batch, and its adapter must be installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from kt_runtime.errors import NotFoundError
from kt_runtime.sglang_patch.faults.answers import described, end_request, failure_of, status_of, tell_client
from kt_runtime.sglang_patch.hooks import Hooks

logger = logging.getLogger(__name__)

RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"
SYMBOLS = (
    f"{RECEIVER}.sock_recv",
    f"{RECEIVER}.SchedulerRequestReceiver.unwrap_pickle_wrapper",
    "sglang.srt.managers.scheduler.Scheduler.process_input_requests",
    "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
    "sglang.srt.managers.scheduler.Scheduler.handle_embedding_request",
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
)


@dataclass(frozen=True)
class Unreadable:
    """Replaces a message that could not be decoded. `rids`: ids of the message's requests, as far as known."""

    rids: tuple[str, ...]
    error: Exception


def install(hooks: Hooks) -> None:
    sock_recv, unwrap, process, generate, embed = SYMBOLS[:5]
    hooks.around(sock_recv, receive)
    hooks.around(unwrap, unwrap_each)
    hooks.around(process, process_each)
    hooks.around(generate, accept)
    hooks.around(embed, accept)


def receive(original: Callable[..., Any], socket: zmq.Socket, flags: int = 0) -> Any:
    """A message of the frontend. Raises only ZMQError: there is no message, or the socket is closed."""
    try:
        return original(socket, flags)
    except zmq.ZMQError:
        raise
    except Exception as error:  # noqa: BLE001 - handed on: `answer_failure` logs it
        return Unreadable((), error)


def unwrap_each(original: Callable[..., None], receiver: Any, requests: list[Any] | None) -> None:
    for place, request in enumerate(requests or []):
        try:
            original(receiver, [request])
        except Exception as error:  # noqa: BLE001 - handed on: `answer_failure` logs it
            assert requests is not None
            requests[place] = Unreadable(_rids_of(request), error)


def process_each(original: Callable[..., None], scheduler: Any, requests: list[Any]) -> None:
    if not requests:
        _try(original, scheduler, [], None)
    for request in requests:
        if isinstance(request, Unreadable):
            answer_failure(scheduler, request, request.error)
        else:
            _try(original, scheduler, [request], request)


def _try(original: Callable[..., None], scheduler: Any, requests: list[Any], request: Any) -> None:
    try:
        original(scheduler, requests)
    except Exception as error:  # noqa: BLE001 - logged by `answer_failure`
        answer_failure(scheduler, request, error)


def answer_failure(scheduler: Any, message: Any, error: Exception) -> None:
    """Ends every request in `message`, or answers a control request with a failure.

    `message` None: the exception came between two messages and is only logged.
    """
    rids = _rids_of(message)
    logger.error("%s failed, requests %s end", type(message).__name__, list(rids), exc_info=error)
    if message is None:
        return
    answer = None if rids else failure_of(message, error)
    if answer is not None:
        scheduler.send_control_output(answer, message)
    for rid in rids:
        found = [req for req in _waiting(scheduler) if req.rid == rid]
        for req in found:
            end_request(scheduler, req, described(error), status_of(error))
        if not found:
            tell_client(scheduler, rid, described(error), message, status_of(error))


def _waiting(scheduler: Any) -> list[Any]:
    return [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]


def _rids_of(message: Any) -> tuple[str, ...]:
    if isinstance(message, Unreadable):
        return message.rids
    if hasattr(message, "batch"):
        return tuple(request.rid for request in message.batch)
    return (message.rid,) if hasattr(message, "sampling_params") else ()


def accept(original: Callable[..., Any], scheduler: Any, request: Any, **kwargs: Any) -> Any:
    """Handles and tries one generating request. Never raises."""
    before = {id(req) for req in _waiting(scheduler)}
    try:
        original(scheduler, request, **kwargs)
        for req in _waiting(scheduler):
            if id(req) not in before:
                dry_run(scheduler, req)
    except Exception as error:  # noqa: BLE001 - logged by `answer_failure`
        answer_failure(scheduler, request, error)


def dry_run(scheduler: Any, req: Any) -> None:
    """Raises the errors that a batch with only this request would raise before its forward pass."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    manager = scheduler.tp_worker.model_runner.lora_manager
    if req.lora_id is not None and req.lora_id not in manager.loras:
        raise NotFoundError(f"the adapter that this request began with is not installed any more ({req.lora_id!r})")
    SamplingBatchInfo.from_schedule_batch(_Alone([req], scheduler.device), scheduler.model_config.vocab_size)


@dataclass
class _Alone:
    """The fields of a batch that SGLang reads to convert sampling parameters to tensors."""

    reqs: list[Any]
    device: Any
