"""The scheduler's part in the prefix cache's tiers: it waits for copies without spinning, and ends when all is written.

Symbols (SGLang 0.5.23) and reasons:

- `Scheduler.on_idle`: called again and again while nothing can be computed. With pages on their way between the tiers
  the scheduler does not count as idle and does not sleep; it would keep a core busy that the threads moving the pages
  could use. A rest of a millisecond ends early for a request.
- `Scheduler.release_host_resources`: called when the server was asked to end, and frees the host pool. Pages that were
  computed last are still on their way from there to the disk tier; SGLang ends its storage backend only afterwards.
- `HiCacheStorage`, `MHATokenToKVPoolHost`, `MLATokenToKVPoolHost`: what `cache_backend.py` is made of.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from kt_runtime.sglang_patch import turns
from kt_runtime.sglang_patch.hooks import Hooks

ON_IDLE = "sglang.srt.managers.scheduler.Scheduler.on_idle"
RELEASE_HOST = "sglang.srt.managers.scheduler.Scheduler.release_host_resources"
SYMBOLS = (
    ON_IDLE,
    RELEASE_HOST,
    "sglang.srt.mem_cache.hicache_storage.HiCacheStorage",
    "sglang.srt.mem_cache.pool_host.base.HostKVCache.kv_buffer",
    "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.get_page_buffer_meta",
    "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost.get_page_buffer_meta",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.check_hicache_events",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.ongoing_backup",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.ongoing_write_through",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.shutdown",
)
REST_SECONDS = 0.001
LAST_COPIES_SECONDS = 2.0

logger = logging.getLogger(__name__)


def install(hooks: Hooks) -> None:
    hooks.after(ON_IDLE, _rest)
    hooks.before(RELEASE_HOST, _write_all)


def _rest(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if not scheduler.enable_hierarchical_cache or turns.has_work() or scheduler.is_fully_idle():
        return
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.poller.poll(1000 * REST_SECONDS)
    else:
        time.sleep(REST_SECONDS)


def _write_all(scheduler: Any) -> None:
    if scheduler.enable_hicache_storage:
        finish_copies(scheduler.tree_cache, LAST_COPIES_SECONDS)
        scheduler.tree_cache.shutdown()  # ends SGLang's storage threads, then closes the disk tier


def finish_copies(tree_cache: Any, timeout_s: float) -> bool:
    """Waits until the pages that were computed have been handed to the disk tier. False if it takes longer."""
    deadline = time.monotonic() + timeout_s
    while tree_cache.ongoing_write_through or tree_cache.ongoing_backup:
        if time.monotonic() > deadline:
            logger.warning("cache: some pages of the last requests did not reach the disk tier")
            return False
        tree_cache.check_hicache_events()
        time.sleep(REST_SECONDS)
    return True
