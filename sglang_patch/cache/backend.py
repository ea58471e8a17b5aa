"""SGLang's storage backend for the prefix cache's disk tier.

Symbol: `sglang.srt.mem_cache.hicache_storage.HiCacheStorage` (SGLang 0.5.23), loaded as the "dynamic" backend by module
path (`arguments.py`). With "interface_v1" in its extra configuration, SGLang passes pages as indices into the host
pool, without a copy. Reason: SGLang's file backend has one flat directory, no checksums, default quota or namespace.

SGLang's keys are chained hashes of the tokens, seeded with the request's `extra_key`, which contains the hash of the
adapter's content (`keys.py`). The tier's namespace covers everything else that a page depends on (`namespace.py`).

Several ranks: each has a part of the directory with the pages of its heads (`kt_runtime.cache.directory`). SGLang
takes of each answer the smallest over the ranks, in the order of its operations: how many pages there are
(`HiCacheController._sync_prefetch_hit_query`), and how many were read (`_reduce_prefetch_ack`). So a page counts where
every rank has it whole, and what one rank's disk does changes no other rank's batches. `HiCacheStorageConfig` says that
latents, the same on all ranks, are written by rank 0 alone, to a storage that all ranks read; here all ranks write.

Only SGLang's storage threads call the methods that may block: `batch_exists`, `batch_get_v1`, `batch_set_v1`. The
scheduler's thread creates the backend, asks it to clear, and closes it at the end of serving.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

from kt_runtime.cache.directory import part_of_rank
from kt_runtime.cache.disk_tier import DiskTier, DiskTierSettings
from kt_runtime.cache.page import Page
from kt_runtime.errors import InvalidValueError, KtError
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.sglang_patch.cache.namespace import namespace
from kt_runtime.sglang_patch.ranks import group

CLOSING_SECONDS = 8.0  # to write the pending pages; the frontend waits somewhat longer for the scheduler's end
# Timeout for a batch of pages. SGLang's thread reads for one request at a time, and an aborted request occupies it
# until its batch is done. If that takes more than 10 s, a flush of the memory tiers ends the scheduler.
READING_SECONDS = 5.0

logger = logging.getLogger(__name__)

_tier: DiskTier | None = None


def disk_tier() -> DiskTier | None:
    """The disk tier of this process. None outside the scheduler's process, and in a server without a disk tier."""
    return _tier


class DiskBackend(HiCacheStorage):
    """Settings come from `kt_runtime.resident.config`. Raises SystemExit if the tier can't be opened."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        storage_config.is_mla_model = False  # asked for `is_storage_writer` only; the controller keeps this object
        self._pools: list[str] = []
        self._tier: DiskTier | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        global _tier
        self.mem_pool_host = mem_pool_host
        # SGLang's threads may use addresses in this buffer after SGLang has dropped its reference to the pool.
        self._memory = mem_pool_host.kv_buffer
        try:
            self._tier = _tier = _open_tier(mem_pool_host)
        except KtError as error:
            raise SystemExit(f"kt-runtime: {error}") from error

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools.append(str(getattr(host_pool_name, "value", host_pool_name)))

    def on_host_pools_registered(self) -> None:
        others = sorted(set(self._pools) - {"kv"})
        if others:
            raise SystemExit(
                f"kt-runtime: --cache-disk: this model keeps {', '.join(others)} beside its keys and values; the disk "
                "tier has room for these only"
            )

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        tier = self._tier
        return tier.look_up(_encoded(keys), _chain(extra_info)) if tier is not None else 0

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        tier = self._tier
        if tier is None:
            return [False] * len(keys)
        return tier.read(list(self._pages(keys, host_indices)), READING_SECONDS)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Reports success for every page: SGLang would log each dropped page, and the tier counts them already."""
        tier = self._tier
        if tier is not None:
            tier.write(list(self._pages(keys, host_indices)), _chain(extra_info))
        return [True] * len(keys)

    def _pages(self, keys: list[str], host_indices: torch.Tensor) -> Iterator[Page]:
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        step = len(pointers) // len(keys)
        pieces = [_memory(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        for position, key in enumerate(_encoded(keys)):
            yield Page(key, pieces[position * step : (position + 1) * step])

    def clear(self) -> None:
        """Starts clearing the tier and does not wait, because the scheduler's thread calls this."""
        if self._tier is not None:
            self._tier.clear(timeout_s=0.0)

    def close(self) -> None:
        global _tier
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.close(CLOSING_SECONDS)
            _tier = None

    # The interface before v1: its methods are abstract and must be defined, but "interface_v1" never calls them

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False


def _open_tier(pool: Any) -> DiskTier:
    settings = ResidentSettings.from_environment()
    if settings is None or settings.cache_directory is None:
        raise InvalidValueError("the disk tier belongs to a server that `kt-runtime serve --cache-disk` started")
    _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
    directory = Path(settings.cache_directory)
    return DiskTier(
        DiskTierSettings(
            directory=part_of_rank(directory, group.rank(), group.num_ranks()),
            root=directory,
            quota_bytes=settings.cache_disk_bytes,
            page_bytes=sum(sizes),
            namespace=namespace(pool, pool.page_size),
            read_only=settings.cache_read_only,
        )
    )


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _chain(extra_info: HiCacheStorageExtraInfo | None) -> list[bytes]:
    return _encoded(extra_info.prefix_keys or []) if extra_info is not None else []


def _memory(pointer: int, size: int) -> memoryview:
    """A view of the host pool's memory, valid during the pool's lifetime."""
    return memoryview((ctypes.c_ubyte * size).from_address(pointer)).cast("B")
