"""Requests of kt-runtime's own, made before the server says that it is ready, leave no trace in the prefix cache.

Symbol (SGLang 0.5.23): `sglang.srt.managers.schedule_batch.Req.__init__`. Reason: whatever a request computed is put
into the tree when it ends, and from there into the host's and the disk's tier. `skip_radix_cache_insert`, which SGLang
has for requests with overridden embeddings, keeps it out. The requests themselves: `frontend_warm_up.py`.
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
