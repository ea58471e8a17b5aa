"""Keeps the KV of kt-runtime's own warm-up requests out of the prefix cache.

Symbol (SGLang 0.5.23): `sglang.srt.managers.schedule_batch.Req.__init__`. Reason: SGLang inserts a request's KV into
the radix tree when the request ends, and copies it from there to the host tier and the disk tier. SGLang's flag
`skip_radix_cache_insert`, meant for requests with overridden embeddings, prevents that. `frontend/warm_up.py` sends
these requests before the server reports that it is ready.
"""

from __future__ import annotations

from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.managers.schedule_batch.Req.__init__",
    "sglang.srt.managers.schedule_batch.Req.skip_radix_cache_insert",
)
RID_PREFIX = "kt-warm-up-"


def install(hooks: Hooks) -> None:
    hooks.after(SYMBOLS[0], leave_no_trace)


def leave_no_trace(_result: None, request: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(request.rid, str) and request.rid.startswith(RID_PREFIX):
        request.skip_radix_cache_insert = True
