"""Aborts a request by its full id instead of a prefix.

Symbol (SGLang 0.5.23): `Scheduler.abort_request`, which calls `GrammarManager.abort_requests`. Reason: both abort every
request whose id starts with the given id. Clients may choose their requests' ids. A client with `"rid": "a"` that
closes its connection would abort all other requests whose id, mostly 32 random hexadecimal digits, starts with "a".
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
NOBODY = ""  # starts with no id, so it matches none


def install(hooks: Hooks) -> None:
    hooks.around(SYMBOLS[0], abort_exactly)


def abort_exactly(original: Callable[..., None], scheduler: Any, message: Any) -> None:
    """Aborts only the request with this exact id: others whose id starts with it have no id during SGLang's search."""
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
