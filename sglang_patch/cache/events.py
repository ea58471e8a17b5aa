"""Lets the scheduler write all pages of the cache's tiers before it ends.

Symbols (SGLang 0.5.23) and reasons:

- `Scheduler.release_host_resources`: called when the server was asked to end, and frees the host pool. The last pages
  may still be in flight from this pool to the disk tier, and SGLang closes its storage backend only afterwards.
- `UnifiedRadixCache._all_reduce`: `check_hicache_events` is a sum over several ranks, so all call it equally often.
- `HiCacheStorage`, `MHATokenToKVPoolHost`, `MLATokenToKVPoolHost`: used by `backend.py`.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from kt_runtime.sglang_patch.hooks import Hooks

RELEASE_HOST = "sglang.srt.managers.scheduler.Scheduler.release_host_resources"
SYMBOLS = (
    RELEASE_HOST,
    "sglang.srt.mem_cache.hicache_storage.HiCacheStorage",
    "sglang.srt.mem_cache.pool_host.base.HostKVCache.kv_buffer",
    "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.get_page_buffer_meta",
    "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost.get_page_buffer_meta",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._all_reduce",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.check_hicache_events",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.ongoing_backup",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.ongoing_write_through",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.shutdown",
)
REST_SECONDS = 0.001
LAST_COPIES_SECONDS = 2.0

logger = logging.getLogger(__name__)


def install(hooks: Hooks) -> None:
    hooks.before(RELEASE_HOST, _write_all)


def _write_all(scheduler: Any) -> None:
    if scheduler.enable_hicache_storage:
        finish_copies(scheduler.tree_cache, LAST_COPIES_SECONDS)
        scheduler.tree_cache.shutdown()  # ends SGLang's storage threads, then closes the disk tier


def finish_copies(tree_cache: Any, timeout_s: float) -> bool:
    """Waits until all computed pages have been passed to the disk tier, on all ranks. False after a timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        num_copies = len(tree_cache.ongoing_write_through) + len(tree_cache.ongoing_backup)
        over_ranks = torch.tensor([num_copies, time.monotonic() > deadline], dtype=torch.int)
        tree_cache._all_reduce(over_ranks, torch.distributed.ReduceOp.MAX)
        num_copies, is_late = over_ranks.tolist()
        if not num_copies:
            return True
        if is_late:
            logger.warning("cache: some pages of the last requests did not reach the disk tier")
            return False
        tree_cache.check_hicache_events()
        time.sleep(REST_SECONDS)
