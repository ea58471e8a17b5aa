"""Gives the resident its turns inside SGLang's scheduler loop.

SGLang 0.5.23 symbols and reasons:

- `Scheduler.run_event_loop`: the moment at which the model is loaded and nothing is served yet. The resident is built
  there, around the scheduler's own model.
- `SchedulerRequestReceiver.recv_requests`: called once per turn on every rank; what rank 0 adds to `local_reqs` is
  broadcast to all of them. The resident's decisions travel this way, so that ranks never disagree.
- `Scheduler.ingest_requests`: after it, the turn's training slices run, between two of SGLang's batches.
- `IdleSleeper.maybe_sleep`: with `--sleep-on-idle` the scheduler sleeps until a request arrives; it must not while
  there is training work, and must wake for the training protocol's requests, for what the resident's own threads have
  finished, and for the frontend's answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kt_runtime.resident.config import ResidentSettings
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.managers.scheduler.Scheduler.run_event_loop",
    "sglang.srt.managers.scheduler.Scheduler.ingest_requests",
    "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests",
    "sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep",
)

_resident: Any = None  # kt_runtime.resident.server.Resident of this process, once the event loop starts


@dataclass(frozen=True)
class Decision:
    """Rides on SGLang's request broadcast; never reaches its dispatcher."""

    payload: bytes


def install(hooks: Hooks) -> None:
    """Hooks a server that `kt-runtime serve` started; in any other SGLang process, nothing."""
    if ResidentSettings.from_environment() is None:
        return
    run_event_loop, ingest_requests, recv_requests, maybe_sleep = SYMBOLS
    hooks.around(run_event_loop, _build_resident)
    hooks.around(ingest_requests, _turn)
    hooks.around(recv_requests, _with_decisions)
    hooks.around(maybe_sleep, _sleep)


def _build_resident(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    global _resident
    from kt_runtime.resident.server import Resident
    from kt_runtime.sglang_patch.host import SGLangHost

    settings = ResidentSettings.from_environment()
    assert settings is not None
    host = SGLangHost(scheduler, settings)
    _resident = Resident.start(host, settings)
    if scheduler.idle_sleeper is not None:
        import zmq

        for wakeup in _resident.wakeups:
            scheduler.idle_sleeper.poller.register(wakeup, zmq.POLLIN)
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        _resident.close()


def _with_decisions(
    original: Callable[..., list[Any]], receiver: Any, local_reqs: list[Any] | None = None
) -> list[Any]:
    if _resident is None:
        return original(receiver, local_reqs=local_reqs)
    ours = [Decision(payload) for payload in _resident.decisions()]
    received = original(receiver, local_reqs=[*(local_reqs or []), *ours])
    _resident.apply([request.payload for request in received if isinstance(request, Decision)])
    return [request for request in received if not isinstance(request, Decision)]


def _turn(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    received = original(scheduler, *args, **kwargs)
    if _resident is not None:
        _resident.turn()
    return received


def has_work() -> bool:
    """True while the resident could do something: the scheduler's thread must not rest then. It may while the resident
    only waits, for a thread of its own or for the frontend: they wake it."""
    return _resident is not None and bool(_resident.has_work())


def _sleep(original: Callable[..., Any], sleeper: Any, *args: Any, **kwargs: Any) -> Any:
    if has_work():
        return None
    return original(sleeper, *args, **kwargs)
