"""A request is aborted by its whole id.

Symbol (SGLang 0.5.23): `Scheduler.abort_request`, `GrammarManager.abort_requests` within it. Reason: they abort every
request whose id begins with the one that is given. A client may choose its request's id: with `"rid": "a"`, and by
closing its connection, it would end all requests of others whose id, mostly 32 random hexadecimal digits, begins so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.managers.scheduler.Scheduler.abort_request",
    "sglang.srt.managers.scheduler.Scheduler.collect_inflight_reqs",
    "sglang.srt.managers.scheduler.Scheduler.grammar_manager",
)
NOBODY = ""  # begins with no id


def install(hooks: Hooks) -> None:
    hooks.around(SYMBOLS[0], abort_exactly)


def abort_exactly(original: Callable[..., None], scheduler: Any, message: Any) -> None:
    """The others that SGLang would take for the one have no id while it looks for it."""
    if message.abort_all:
        original(scheduler, message)
        return
    others = {id(req): req for req in _requests(scheduler) if _is_taken_for(req.rid, message.rid)}
    ids = {key: req.rid for key, req in others.items()}
    try:
        for req in others.values():
            req.rid = NOBODY
        original(scheduler, message)
    finally:
        for key, req in others.items():
            req.rid = ids[key]


def _is_taken_for(rid: str, asked: str) -> bool:
    return rid != asked and rid.startswith(asked)


def _requests(scheduler: Any) -> list[Any]:
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    queued = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    return [*chunked, *queued, *scheduler.collect_inflight_reqs()]
