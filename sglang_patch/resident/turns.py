"""Runs the resident's turns inside SGLang's scheduler loop.

SGLang 0.5.23 symbols and reasons:

- `Scheduler.run_event_loop`: called when the model is loaded and no request is served yet. The resident is created at
  this point and shares the scheduler's model.
- `SchedulerRequestReceiver.recv_requests`: called once per turn on every rank. SGLang broadcasts the entries that rank
  0 adds to `local_reqs` to all ranks. The resident's decisions are such entries, so that ranks never disagree.
- `Scheduler.ingest_requests`: the turn's training slices run after this call, between two of SGLang's batches. Hot
  experts move here too.
- `Scheduler._should_defer_prefill`: asked before each batch whether prompts wait for another decode step. With
  training, the targets may ask for it (`kt_runtime.resident.pacing.budget`).
- `IdleSleeper.maybe_sleep`: with `--sleep-on-idle` the scheduler sleeps until a request arrives. The scheduler must not
  sleep while there is training work. Requests of the training protocol, results of the resident's own threads and the
  frontend's answers must wake it. Nor must it sleep once the frontend has asked it to end: SGLang looks at
  `Scheduler.gracefully_exit` after this sleep, a second later.
- `Scheduler.on_idle`: called in a loop while there is nothing to compute. While pages are in flight between the cache's
  tiers, the scheduler does not count as idle and does not sleep. It would occupy a core that the copying threads could
  use, so it sleeps for a millisecond here. A request ends the sleep early.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kt_runtime.beside import BATCHES
from kt_runtime.priority import come_first, give_way, threads_by_name
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.sglang_patch.faults import lost_device
from kt_runtime.sglang_patch.gpu import hot
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group
from kt_runtime.sglang_patch.resident import members
from kt_runtime.sglang_patch.resident.turn_metrics import TurnMetrics

SYMBOLS = (
    "sglang.srt.managers.scheduler.Scheduler.run_event_loop",
    "sglang.srt.managers.scheduler.Scheduler.ingest_requests",
    "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests",
    "sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep",
    "sglang.srt.managers.scheduler.Scheduler._should_defer_prefill",
    "sglang.srt.managers.scheduler.Scheduler.on_idle",
)

SWITCH_SECONDS = 0.0005
"""After this time a thread that computes in Python lets another one run. A decode step takes the interpreter's lock a
dozen times, and while a thread reads an adapter it would wait 5 ms, Python's default, each time."""
REST_SECONDS = 0.001

_metrics = TurnMetrics()
_resident: Any = None  # kt_runtime.resident.server.Resident of this process, once the event loop starts
_members: Any = None  # its ranks
_ends = False  # the frontend has asked the scheduler to end


@dataclass(frozen=True)
class Decision:
    """Sent with SGLang's request broadcast. Removed before SGLang dispatches the requests."""

    payload: bytes


def install(hooks: Hooks) -> None:
    """Hooks the processes of `kt-runtime serve`. Does nothing in any other SGLang process."""
    if ResidentSettings.from_environment() is None:
        return
    run_event_loop, ingest_requests, recv_requests, maybe_sleep, should_defer_prefill, on_idle = SYMBOLS
    hooks.around(run_event_loop, _build_resident)
    hooks.around(ingest_requests, _turn)
    hooks.around(recv_requests, _with_decisions)
    hooks.around(maybe_sleep, _sleep)
    hooks.around(should_defer_prefill, _defers)
    hooks.after(on_idle, _rest)


def _build_resident(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    global _resident, _members
    from kt_runtime.resident.server import Resident
    from kt_runtime.sglang_patch.resident.host import SGLangHost

    settings = ResidentSettings.from_environment()
    assert settings is not None
    sys.setswitchinterval(SWITCH_SECONDS)
    _prefer_engine()
    group.agree_on_tokens()
    host = SGLangHost(scheduler, settings)
    _members = host.members
    _resident = Resident.start(host, settings) if group.rank() == 0 else Resident(host, settings, None)
    if scheduler.idle_sleeper is not None:
        import zmq

        for wakeup in _resident.wakeups:
            scheduler.idle_sleeper.poller.register(wakeup, zmq.POLLIN)
    try:
        with lost_device.ends_process():
            return original(scheduler, *args, **kwargs)
    finally:
        _resident.close()


def _prefer_engine() -> None:
    """The threads that are there now compute the batches, but for gloo's: they look for messages of other ranks a
    hundred times a second, each taking the processor from a decode step."""
    for thread, name in threads_by_name().items():
        if name.startswith("gloo") and group.num_ranks() == 1:
            give_way(thread)
        else:
            come_first(thread)


def _with_decisions(
    original: Callable[..., list[Any]], receiver: Any, local_reqs: list[Any] | None = None
) -> list[Any]:
    if _resident is None:
        return original(receiver, local_reqs=local_reqs)
    ours: list[Any] = []
    BATCHES.give()  # before the turn looks for what has ended meanwhile
    if group.rank() == 0:
        ours = [Decision(payload) for payload in _resident.decisions()]
        ours += [members.Ask()] if _members.is_due() else []
    else:
        _resident.follow()
    received = original(receiver, local_reqs=[*(local_reqs or []), *ours])
    _resident.apply([request.payload for request in received if isinstance(request, Decision)])
    if any(isinstance(request, members.Ask) for request in received):
        _members.tell()
    return [request for request in received if not isinstance(request, (Decision, members.Ask))]


def _turn(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    global _ends
    received = original(scheduler, *args, **kwargs)
    _ends = scheduler.gracefully_exit
    hot.turn()
    if _resident is not None:
        _resident.turn()
        if group.rank() == 0 and _metrics.is_due:
            _metrics.publish(_resident.training_turns())
    return received


def _defers(original: Callable[..., bool], scheduler: Any, running_batch: Any) -> bool:
    if original(scheduler, running_batch):
        return True
    if _resident is None or running_batch.is_empty() or running_batch.is_prefill_only:
        return False
    has_prompts = bool(scheduler.waiting_queue) and scheduler.chunked_req is None
    return has_prompts and bool(_resident.holds_prompts())


def has_work() -> bool:
    """True while the resident has work for the scheduler's thread, which must not sleep then. False while the resident
    only waits for its own threads or for the frontend: both wake the scheduler."""
    return hot.has_work() or (_resident is not None and bool(_resident.has_work()))


def _sleep(original: Callable[..., Any], sleeper: Any, *args: Any, **kwargs: Any) -> Any:
    if _ends or has_work():
        return None
    return original(sleeper, *args, **kwargs)


def _rest(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if not scheduler.enable_hierarchical_cache or has_work() or scheduler.is_fully_idle():
        return
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.poller.poll(1000 * REST_SECONDS)
    else:
        time.sleep(REST_SECONDS)
