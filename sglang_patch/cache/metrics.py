"""Counts hits, misses, evictions and copies per tier of the prefix cache: `/metrics`, `/kt/status`, `meta_info`.

The disk tier has its own counters. SGLang manages the pages on the device and the host. It reports how many bytes it
copied, but neither hits per tier nor the host pool's evictions. Hence, in SGLang 0.5.23:

- `ScheduleBatch.prepare_for_extend`: SGLang decides here, once per request, how many prompt tokens came from which
  tier (`Req.cached_tokens_device`, `_host`, `_storage`).
- `BasePrefixCache.update_eviction_metrics`, `UnifiedRadixCache.evict_host`: evictions on the device and on the host.
- `RadixCacheMetricsCollector.increment_backup_num_bytes`, `.increment_load_back_num_bytes`: copies to, from the host.
- `Scheduler.ingest_requests`: called once per turn of the loop, at least every second; the metrics are published here.
- `SchedulerOutputStreamer.get_cached_tokens_details`: becomes `meta_info.cached_tokens_details`. SGLang returns None if
  nothing was cached, and a class name for the disk.

Several ranks have the same pages, each of its heads, so rank 0 alone publishes. Only disks differ: `told` says what the
other ranks have noted of theirs (`resident/members.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kt_runtime.cache.directory import part_of_rank
from kt_runtime.cache.disk import Counters
from kt_runtime.cache.disk_tier import DiskTier
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.sglang_patch.cache.metrics_files import MetricsFiles
from kt_runtime.sglang_patch.cache.prometheus import PublishedTiers
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group
from kt_runtime.wire.status import CacheTier

COLLECTOR = "sglang.srt.observability.metrics_collector.RadixCacheMetricsCollector"
PREPARE = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend"
DEVICE_EVICTED = "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.update_eviction_metrics"
HOST_EVICTED = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evict_host"
WRITTEN_TO_HOST = f"{COLLECTOR}.increment_backup_num_bytes"
READ_FROM_HOST = f"{COLLECTOR}.increment_load_back_num_bytes"
INGEST = "sglang.srt.managers.scheduler.Scheduler.ingest_requests"
DETAILS = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details"
SYMBOLS = (
    *(PREPARE, DEVICE_EVICTED, HOST_EVICTED, WRITTEN_TO_HOST, READ_FROM_HOST, INGEST, DETAILS),
    "sglang.srt.managers.schedule_batch.Req._cache_breakdown_computed",
    "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
    "sglang.srt.managers.schedule_batch.Req.cached_tokens_device",
    "sglang.srt.managers.schedule_batch.Req.cached_tokens_host",
    "sglang.srt.mem_cache.memory_pool.KVCache.get_kv_size_bytes",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evictable_size",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.protected_size",
    "sglang.srt.mem_cache.pool_host.base.HostKVCache.available_size",
    "sglang.srt.mem_cache.pool_host.base.HostKVCache.logical_size",
    "sglang.srt.mem_cache.pool_host.base.HostKVCache.size_per_token",
)
DISK_NAME = "kt-runtime disk"
PUBLISH_SECONDS = 1.0
FAULTS = ("corrupt", "dropped", "read_errors", "write_errors", "late")
"""Counters of the disk tier that say what has gone wrong."""

_NAMES = ("hits", "misses", "evicted_tokens", "bytes_read", "bytes_written")
_device, _host = Counters(_NAMES), Counters(_NAMES)
_published: PublishedTiers | None = None
_files = MetricsFiles(None)
_next_publication_s = 0.0
_others: dict[int, CacheTier] = {}  # the disk tiers of other ranks, as these told last


def install(hooks: Hooks) -> None:
    """Hooks the processes of `kt-runtime serve`. Does nothing in any other SGLang process."""
    if ResidentSettings.from_environment() is None:
        return
    hooks.around(PREPARE, _count_hits)
    hooks.after(DEVICE_EVICTED, _count_device_evictions)
    hooks.after(HOST_EVICTED, _count_host_evictions)
    hooks.after(WRITTEN_TO_HOST, _count_written)
    hooks.after(READ_FROM_HOST, _count_read)
    hooks.after(INGEST, _publish_periodically)
    hooks.after(DETAILS, describe_cached_tokens)


def tiers(scheduler: Any) -> list[CacheTier]:
    """The tiers of this server, nearest to the device first. Call it in the scheduler's thread."""
    found = [_device_tier(scheduler)]
    if (pool := _host_pool(scheduler)) is not None:
        found.append(_host_tier(pool, scheduler.page_size))
    if (disk := own_disk(scheduler)) is not None:
        found.append(with_faults_of(_others, disk))
    return found


def own_disk(scheduler: Any) -> CacheTier | None:
    """This rank's part of the disk tier, None without one."""
    if (disk := _disk()) is None or (pool := _host_pool(scheduler)) is None:
        return None
    return disk_status(*disk, scheduler.page_size, scheduler.page_size * pool.size_per_token)


def told(disks: Mapping[int, CacheTier]) -> None:
    """The disk tiers of all ranks, by rank."""
    _others.clear()
    _others.update((rank, disk) for rank, disk in disks.items() if rank != group.rank())


def with_faults_of(others: Mapping[int, CacheTier], own: CacheTier) -> CacheTier:
    """`own`, of rank 0, with the directory of all ranks and what has gone wrong with any disk. Pages and bytes stay."""
    if not others:
        return own
    disks = {0: own, **others}
    counters = {name: sum(disk.counters[name] for disk in disks.values()) for name in FAULTS}
    return msgspec.structs.replace(
        own,
        corrupt=counters["corrupt"],
        counters={**own.counters, **counters},
        directory=str(Path(own.directory or "").parent),
        reading_stopped=_first_reason({rank: disk.reading_stopped for rank, disk in disks.items()}),
        writing_stopped=_first_reason({rank: disk.writing_stopped for rank, disk in disks.items()}),
    )


def _first_reason(reasons: Mapping[int, str | None]) -> str | None:
    return next((f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()) if reason is not None), None)


def _device_tier(scheduler: Any) -> CacheTier:
    pool, tree = scheduler.token_to_kv_pool_allocator.get_kvcache(), scheduler.tree_cache
    sizes = pool.get_kv_size_bytes()  # (K, V) or their sum; the pool has one page more than `size` tokens
    # SGLang's counts are NumPy integers, which the wire format refuses.
    token_bytes = int(sum(sizes) if isinstance(sizes, tuple) else sizes) // (pool.size + pool.page_size)
    used_tokens = tree.evictable_size() + tree.protected_size()
    return _memory_tier(
        "device", _device, scheduler.page_size, token_bytes, used_tokens, scheduler.max_total_num_tokens
    )


def _host_tier(pool: Any, page_tokens: int) -> CacheTier:
    used_tokens = pool.logical_size - pool.available_size()
    return _memory_tier("host", _host, page_tokens, pool.size_per_token, used_tokens, pool.logical_size)


def _memory_tier(
    name: str, counters: Counters, page_tokens: int, token_bytes: int, used_tokens: int, capacity_tokens: int
) -> CacheTier:
    counts = counters.snapshot()
    return CacheTier(
        tier=name,
        page_tokens=page_tokens,
        page_bytes=page_tokens * token_bytes,
        pages=used_tokens // page_tokens,
        used_bytes=used_tokens * token_bytes,
        capacity_bytes=capacity_tokens * token_bytes,
        hits=counts["hits"],
        misses=counts["misses"],
        evictions=counts["evicted_tokens"] // page_tokens,
        bytes_read=counts["bytes_read"],
        bytes_written=counts["bytes_written"],
    )


def disk_status(disk: DiskTier, settings: ResidentSettings, page_tokens: int, page_bytes: int) -> CacheTier:
    status, counters = disk.status(), disk.counters.snapshot()
    return CacheTier(
        tier="disk",
        page_tokens=page_tokens,
        page_bytes=page_bytes,
        pages=int(status["records"] or 0),
        used_bytes=int(status["disk_bytes"] or 0),
        capacity_bytes=int(status["quota_bytes"] or 0),
        hits=counters["hits"],
        misses=counters["misses"],
        evictions=counters["evictions"],
        bytes_read=counters["bytes_read"],
        bytes_written=counters["bytes_written"],
        corrupt=counters["corrupt"],
        counters=counters,
        directory=str(part_of_rank(Path(settings.cache_directory or ""), group.rank(), group.num_ranks())),
        read_only=settings.cache_read_only,
        reading_stopped=_text(status["reading_stopped"]),
        writing_stopped=_text(status["writing_stopped"]),
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _host_pool(scheduler: Any) -> Any:
    return getattr(scheduler.tree_cache, "full_kv_pool_host", None) if scheduler.enable_hierarchical_cache else None


def _disk() -> tuple[DiskTier, ResidentSettings] | None:
    settings = ResidentSettings.from_environment()
    if settings is None or settings.cache_directory is None:
        return None
    from kt_runtime.sglang_patch.cache.backend import disk_tier

    tier = disk_tier()
    return None if tier is None else (tier, settings)


# Counting, in the scheduler's thread


def _count_hits(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    undecided = [request for request in batch.reqs if not request._cache_breakdown_computed]
    result = original(batch, *args, **kwargs)
    for request in undecided:
        if request._cache_breakdown_computed:
            _count_request(request, batch.tree_cache)
    return result


def _count_request(request: Any, tree: Any) -> None:
    """Counts whole pages without the prompt's last token: no tier is asked for a partial page or for this token."""
    page_tokens = tree.page_size
    pages = request._compute_max_prefix_len(len(request.origin_input_ids)) // page_tokens
    device_pages = min(pages, request.cached_tokens_device // page_tokens)
    _device.add("hits", device_pages)
    _device.add("misses", pages - device_pages)
    if tree.cache_controller is not None:
        left = pages - device_pages
        host_pages = min(left, request.cached_tokens_host // page_tokens)
        _host.add("hits", host_pages)
        _host.add("misses", left - host_pages)


def _count_device_evictions(_result: Any, _tree: Any, num_evicted: int, *_args: Any, **_kwargs: Any) -> None:
    _device.add("evicted_tokens", num_evicted)


def _count_host_evictions(num_evicted: int, *_args: Any, **_kwargs: Any) -> None:
    _host.add("evicted_tokens", num_evicted)


def _count_written(_result: Any, _collector: Any, num_bytes: int) -> None:
    _host.add("bytes_written", num_bytes)


def _count_read(_result: Any, _collector: Any, num_bytes: int) -> None:
    _host.add("bytes_read", num_bytes)


# Publishing


def _publish_periodically(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    global _published, _files, _next_publication_s
    now_s = time.monotonic()
    if now_s < _next_publication_s:
        return
    _next_publication_s = now_s + PUBLISH_SECONDS
    if _published is None:
        directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        _published, _files = PublishedTiers(), MetricsFiles(Path(directory) if directory else None)
    if group.rank() == 0:
        _published.publish(tiers(scheduler))
    _files.take_room()


def describe_cached_tokens(result: dict[str, int | str] | None, streamer: Any, request: Any) -> dict[str, int | str]:
    """Prompt tokens by the tier that had their KV, also if nothing was cached. `computed`: tokens that no tier had."""
    details: dict[str, int | str] = {"device": 0, "host": 0, **(result or {})}
    if streamer.enable_hicache_storage():
        details["storage"] = details.get("storage", 0)
        details["storage_backend"] = DISK_NAME
    cached = sum(int(details.get(tier, 0)) for tier in ("device", "host", "storage"))
    details["computed"] = max(0, len(request.origin_input_ids) - cached)
    return details
