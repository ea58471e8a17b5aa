"""Measures each request's time to first token and per output token, in the scheduler's process.

SGLang 0.5.23 measures them in the frontend, where training's turns can't read them. Symbols:

- `Scheduler.process_batch_result`: called after every batch, when its requests have their new tokens.
- `Req.output_ids`, `Req.finished`, `Req.rid`, `Req.time_stats.wait_queue_entry_time` (time.perf_counter): read.
"""

from __future__ import annotations

import time
from typing import Any

from kt_runtime.resident.config import ResidentSettings
from kt_runtime.resident.pacing.latencies import Latencies
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.warm_up import RID_PREFIX

SYMBOLS = (
    "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
    "sglang.srt.managers.schedule_batch.Req.finished",
    "sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.wait_queue_entry_time",
)
NOT_COUNTED = ("HEALTH_CHECK", RID_PREFIX)
"""Beginnings of the ids of SGLang's own requests, and of those that warm it up."""

measured = Latencies()


def install(hooks: Hooks) -> None:
    """Hooks the processes of `kt-runtime serve`. Does nothing in any other SGLang process."""
    if ResidentSettings.from_environment() is not None:
        hooks.after(SYMBOLS[0], _note)


def _note(_result: Any, _scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    now = time.perf_counter()
    for request in batch.reqs:
        if not request.output_ids:
            continue
        first = getattr(request, "kt_first_token_time", None)
        if first is None:
            request.kt_first_token_time = first = now
        if request.rid.startswith(NOT_COUNTED):
            continue
        if request.finished() and not getattr(request, "kt_is_measured", False):
            request.kt_is_measured = True
            measured.add(request.time_stats.wait_queue_entry_time, first, now, len(request.output_ids))


def stream(request: Any, now: float) -> tuple[float, int] | None:
    """Seconds since the request's first token, and its tokens so far; None without one."""
    first = getattr(request, "kt_first_token_time", None)
    return None if first is None else (now - first, len(request.output_ids))


def waited(request: Any, now: float) -> float:
    """Seconds since the request's arrival at the engine; 0 where it is not known."""
    arrived = request.time_stats.wait_queue_entry_time
    return max(0.0, now - arrived) if arrived > 0 else 0.0
