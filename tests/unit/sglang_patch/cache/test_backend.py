"""The disk tier as SGLang's storage controller sees it: made by SGLang's factory, around SGLang's pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kt_runtime.cache import inspection
from kt_runtime.cache.format import Namespace
from kt_runtime.resident.config import ENVIRONMENT_VARIABLE, ResidentSettings
from kt_runtime.sglang_patch.arguments import DISK_BACKEND

KEYS = [f"{number:064x}" for number in range(3)]
SLOTS = torch.cat([torch.arange(128, 192), torch.arange(64, 128), torch.arange(320, 384)])


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched_sglang: None) -> Path:
    """What a server's scheduler finds in its environment. The namespace would need a loaded model."""
    from kt_runtime.sglang_patch.cache import backend as cache_backend

    settings = ResidentSettings(
        model="m",
        model_directory=str(tmp_path),
        wire_address="ipc:///none",
        names_address="ipc:///none",
        adapter_directory=str(tmp_path),
        cache_directory=str(tmp_path / "cache"),
        cache_disk_bytes=16 << 20,
        cache_page_tokens=64,
    )
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, settings.to_environment()[ENVIRONMENT_VARIABLE])
    monkeypatch.setattr(
        cache_backend,
        "namespace",
        lambda pool, page_tokens: Namespace(
            weights="w", kv_dtype=str(pool.dtype), page_tokens=page_tokens, layout=pool.layout
        ),
    )
    return tmp_path / "cache"


def make(pools: Any, rank: int = 0) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=rank + 1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=pools.is_mla,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="m",
        extra_config=DISK_BACKEND,
    )
    backend = StorageBackendFactory.create_backend("dynamic", config, pools.host)
    backend.config = config  # which SGLang's controller asks whether this rank writes
    return backend


def opened(pools: Any, rank: int = 0) -> Any:
    backend = make(pools, rank)
    backend.register_mem_pool_host(pools.host)
    backend.on_host_pools_registered()
    return backend


def test_pages_come_back_after_a_restart_as_they_were_computed(pools: Any, directory: Path) -> None:
    from kt_runtime.sglang_patch.cache.backend import disk_tier

    expected = [layer[SLOTS].clone() for layer in pools.layers]
    backend = opened(pools)
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(KEYS, pools.copy_to_host(SLOTS)) == [True] * 3
    backend.close()
    pools.host.kv_buffer.zero_()
    for layer in pools.layers:
        layer.zero_()
    backend = opened(pools)
    assert disk_tier() is not None
    assert backend.batch_exists([*KEYS, "f" * 64]) == 3
    host_slots = pools.host.alloc(192)
    assert backend.batch_get_v1(KEYS, host_slots) == [True] * 3
    pools.copy_to_device(host_slots, torch.arange(512, 704))
    backend.close()
    assert disk_tier() is None
    for layer, pages in zip(pools.layers, expected, strict=True):
        assert torch.equal(layer[512:704], pages)


def test_a_page_that_is_not_there_leaves_the_host_pool_as_it_was(pools: Any, directory: Path) -> None:
    backend = opened(pools)
    host_slots = pools.copy_to_host(SLOTS)
    before = pools.host.kv_buffer.clone()
    assert backend.batch_get_v1(KEYS, host_slots) == [False] * 3
    assert torch.equal(pools.host.kv_buffer, before)
    backend.close()


def test_once_closed_it_has_nothing_and_takes_nothing(pools: Any, directory: Path) -> None:
    backend = opened(pools)
    host_slots = pools.copy_to_host(SLOTS)
    backend.batch_set_v1(KEYS, host_slots)
    backend.close()
    backend.close()
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS, host_slots) == [False] * 3
    assert backend.batch_set_v1(KEYS, host_slots) == [True] * 3
    backend.clear()


def test_each_rank_has_a_part_of_the_directory_and_writes_what_all_have(
    pools: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kt_runtime.sglang_patch.ranks import group

    monkeypatch.setattr(group, "num_ranks", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(group, "rank", lambda rank=rank: rank)
        backend = opened(pools, rank)
        assert backend.config.is_storage_writer
        assert backend.batch_exists(KEYS) == 0  # what rank 0 has written is not rank 1's
        backend.batch_set_v1(KEYS, pools.copy_to_host(SLOTS))
        backend.close()
    assert [inspection.statistics(directory / f"rank-{rank}-of-2").records for rank in (0, 1)] == [3, 3]


def test_clearing_does_not_keep_the_scheduler(pools: Any, directory: Path) -> None:
    from kt_runtime.sglang_patch.cache.backend import disk_tier

    backend = opened(pools)
    backend.batch_set_v1(KEYS, pools.copy_to_host(SLOTS))
    backend.clear()
    tier = disk_tier()
    assert tier is not None
    assert tier.clear()  # waits for the same thread, hence for what was asked before
    assert backend.batch_exists(KEYS) == 0
    backend.close()


def test_a_second_server_in_the_same_directory_ends_with_the_reason(pools: Any, directory: Path) -> None:
    first = opened(pools)
    with pytest.raises(SystemExit, match=str(directory)):
        opened(pools)
    first.close()


def test_a_model_with_another_pool_beside_its_keys_and_values_is_refused_by_the_pools_name(
    pools: Any, directory: Path
) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    backend = make(pools)
    backend.register_mem_pool_host(pools.host)
    backend.register_mem_host_pool_v2(pools.host, PoolName.KV)
    backend.on_host_pools_registered()
    backend.register_mem_host_pool_v2(pools.host, PoolName.MAMBA)
    with pytest.raises(SystemExit, match="mamba"):
        backend.on_host_pools_registered()
    backend.close()


def test_a_server_that_kt_runtime_did_not_start_is_told_so(
    pools: Any, patched_sglang: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    with pytest.raises(SystemExit, match="--cache-disk"):
        make(pools).register_mem_pool_host(pools.host)
