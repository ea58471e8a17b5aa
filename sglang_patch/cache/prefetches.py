"""Several ranks: all prefetches from the disk tier end before SGLang stops the threads that make them.

Symbols (SGLang 0.5.23): `HiCacheController._stop_storage_threads`, called when the tiers in memory are flushed and when
the server ends; `HybridCacheController.prefetch`, `.allocate_storage_hit`, `._sync_prefetch_hit_query` and
`._reduce_prefetch_ack`: a prefetch and its reading begin in the scheduler's thread, and end in SGLang's threads.

Reason: each prefetch takes part in sums over the ranks, in SGLang's threads. SGLang stops these threads without regard
to what they are at. A request that ended while its pages were read could be dropped on one rank after another rank has
begun its sum: this rank would wait for the rest of the server's life, or take part in the sum of another prefetch.

All ranks begin the same prefetches, so each one's end as soon as the others' do, and no rank waits for one that has
stopped its threads.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from kt_runtime.resident.config import ResidentSettings
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group

STOP = "sglang.srt.managers.cache_controller.HiCacheController._stop_storage_threads"
CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
ASK, READ = f"{CONTROLLER}.prefetch", f"{CONTROLLER}.allocate_storage_hit"
ASKED, ACKNOWLEDGED = f"{CONTROLLER}._sync_prefetch_hit_query", f"{CONTROLLER}._reduce_prefetch_ack"
SYMBOLS = (STOP, ASK, READ, ASKED, ACKNOWLEDGED)

WAIT_SECONDS = 10.0  # as long as SGLang then waits for each thread; a batch of pages takes 5 s at most (`backend.py`)
REST_SECONDS = 0.001

logger = logging.getLogger(__name__)


@dataclass
class Prefetches:
    """Counts of this rank's prefetches since its start. Each count has one thread that writes it."""

    asked: int = 0
    answered: int = 0
    begun: int = 0
    ended: int = 0

    def have_ended(self) -> bool:
        return self.answered >= self.asked and self.ended >= self.begun


_counts = Prefetches()


def install(hooks: Hooks) -> None:
    """Hooks the processes of `kt-runtime serve`. Does nothing in any other SGLang process."""
    if ResidentSettings.from_environment() is None:
        return
    hooks.before(STOP, _wait)
    hooks.after(ASK, _asked)
    hooks.after(ASKED, _answered)
    hooks.after(READ, _begun)
    hooks.after(ACKNOWLEDGED, _acknowledged)


def _asked(_operation: Any, *_args: Any, **_kwargs: Any) -> None:
    _counts.asked += 1


def _answered(_hit_tokens: int, *_args: Any, **_kwargs: Any) -> None:
    _counts.answered += 1


def _begun(allocated: tuple[Any, int], *_args: Any, **_kwargs: Any) -> None:
    _counts.begun += allocated[0] is not None  # else the prefetch is given up


def _acknowledged(_result: None, _controller: Any, ack: Any) -> None:
    _counts.ended += bool(ack.completed_req)


def _wait(_controller: Any) -> None:
    if group.num_ranks() == 1:
        return
    deadline = time.monotonic() + WAIT_SECONDS
    while not _counts.have_ended():
        if time.monotonic() > deadline:
            logger.warning("cache: prefetches have not ended after %g s", WAIT_SECONDS)
            return
        time.sleep(REST_SECONDS)
