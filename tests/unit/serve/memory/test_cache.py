"""The plan is held against what SGLang's own pools allocate for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.memory.cache import describe, lack_of_room, plan_cache
from kt_runtime.serve.memory.plan import ServingShape, plan_memory
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.serve.options.cache_plan import INDEX_BYTES, CachePlan
from kt_runtime.serve.options.named import ServeOptions

TINY = load_preset("tiny-qwen3-moe").config
LATENT = load_preset("tiny-deepseek-v3").config
WITH_STATES = load_preset("tiny-qwen3-next").config
DIRECTORY = Path("/cache")
MIB = 1 << 20


def plan(config: Any = TINY, **values: Any) -> CachePlan:
    made = plan_cache(ServeOptions(model="m", **values), config, DIRECTORY)
    assert made is not None
    return made


def test_without_any_size_there_is_no_plan() -> None:
    assert plan_cache(ServeOptions(model="m"), TINY, DIRECTORY) is None
    assert plan_cache(ServeOptions(model="m", cache_host_bytes=0), TINY, DIRECTORY) is None


def test_a_device_tier_alone_keeps_pages_of_one_token_and_has_no_directory() -> None:
    alone = plan(cache_device_bytes=3 * MIB)
    assert (alone.page_tokens, alone.device_tokens) == (1, 3 * MIB // 768)
    assert (alone.host_tokens, alone.disk_bytes, alone.directory, alone.host_ratio) == (0, 0, None, 0.0)


def test_tiers_are_whole_pages() -> None:
    tiers = plan(cache_device_bytes=MIB + 1, cache_host_bytes=3 * MIB + 1, cache_disk_bytes=64 * MIB)
    assert (tiers.page_tokens, tiers.token_bytes, tiers.page_bytes) == (64, 768, 64 * 768)
    assert (tiers.device_tokens, tiers.host_tokens) == (21 * 64, 64 * 64)
    assert (tiers.disk_bytes, tiers.directory) == (64 * MIB, DIRECTORY)
    assert plan(cache_disk_bytes=64 * MIB, max_total_tokens=1000, cache_page_tokens=128).device_tokens == 896


def test_a_disk_alone_gets_a_host_tier_that_takes_the_longest_prefix_beside_the_device_tiers_copies() -> None:
    alone = plan(cache_disk_bytes=64 * MIB)
    assert alone.host_tokens == 2 * alone.device_tokens == 2 * 16384
    assert lack_of_room(alone, longest_tokens=10**6) is None
    assert describe(alone) == (
        "prefix cache, pages of 64 tokens: device 16384 tokens (12 MiB), host 32768 tokens (24 MiB), "
        "disk 64 MiB in /cache"
    )


def test_a_host_tier_with_little_room_is_allowed_and_said() -> None:
    tight = plan(max_total_tokens=1024, cache_host_bytes=1280 * 768, cache_disk_bytes=64 * MIB)
    note = lack_of_room(tight, longest_tokens=4096)
    assert note and "has 256 tokens more than the device tier" in note and "--cache-host 1.5 MiB" in note
    assert lack_of_room(tight, longest_tokens=256) is None
    without_disk = plan(max_total_tokens=1024, cache_host_bytes=1280 * 768)
    assert lack_of_room(without_disk, longest_tokens=4096) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cache_device_bytes": 0}, "--cache-device 0 B: 0 tokens of 768 bytes.*at least 16 tokens"),
        (
            {"cache_device_bytes": 100 << 10, "cache_host_bytes": MIB},
            r"--cache-device 100 KiB: 133 tokens of 768 bytes.*at least 256 tokens \(4 pages of 64\), 192 KiB",
        ),
        ({"max_total_tokens": 100, "cache_disk_bytes": MIB}, "--max-total-tokens 100: .*at least 256 tokens"),
        (
            {"cache_host_bytes": MIB},
            "--cache-host 1 MiB: 1344 tokens in pages of 64, and the device tier has 16384 .12 MiB.*24 MiB is a good",
        ),
        ({"cache_host_bytes": 12 * MIB}, "nothing else would ever fit"),
        (
            {"cache_host_bytes": 0, "cache_disk_bytes": MIB},
            "--cache-host 0: pages go to the disk.*leave the option",
        ),
        (
            {"cache_disk_bytes": 100 << 10},
            r"--cache-disk 100 KiB: at least 1 MiB .*8 pages of 64 tokens, 48 KiB",
        ),
        (
            {"cache_disk_bytes": MIB, "cache_page_tokens": 256},
            r"--cache-disk 1 MiB: at least 1.5 MiB .*8 pages of 256 tokens, 192 KiB each",
        ),
    ],
)
def test_sizes_that_nothing_fits_into_are_refused_with_the_numbers(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        plan(**values)


def test_a_host_tier_has_states_in_the_device_s_proportion() -> None:
    """Of 16 requests at most the device has 64 slots, of 40,896 bytes each; a token has 256."""
    options: dict[str, Any] = {"config": WITH_STATES, "max_total_tokens": 1024, "max_running_requests": 16}
    of_device = 1024 * 256 + 64 * 40896
    tiers = plan(**options, cache_host_bytes=3 * of_device)
    assert (tiers.page_tokens, tiers.token_bytes, tiers.host_tokens) == (1, 256, 3 * 1024)
    assert (tiers.state_slots, tiers.slot_bytes, tiers.host_slots) == (64, 40896, 192)
    assert tiers.host_bytes == 3 * of_device
    assert "host 3072 tokens and 192 states (8.24 MiB)" in describe(tiers)
    with pytest.raises(InvalidValueError, match=r"has 1024 \(2.75 MiB with 2.5 MiB of linear attention's states\)"):
        plan(**options, cache_host_bytes=of_device)


def test_the_ranks_of_a_host_share_its_disk_and_each_has_buffers_and_an_index() -> None:
    given = {"max_total_tokens": 1024, "cache_disk_bytes": 96 * MIB, "device": "cpu"}
    two = plan(**given, tp_size=2)
    assert (two.ranks, two.rank_disk_bytes, two.record_bytes) == (2, 48 * MIB, 64 * 768 // 2)
    assert two.disk_memory_bytes == 2 * (512 * MIB + 2048 * INDEX_BYTES)
    assert describe(two).endswith("disk 96 MiB in /cache (48 MiB for each of 2 ranks)")
    hosts = plan(**given, tp_size=2, nnodes=2, node_rank=1, dist_init_addr="127.0.0.1:20000")
    assert (hosts.ranks, hosts.rank_disk_bytes, hosts.record_bytes) == (1, 96 * MIB, 64 * 768 // 2)
    latent = plan(LATENT, **given, tp_size=2)
    assert latent.record_bytes == latent.page_bytes  # every rank has the latents
    assert plan(LATENT, **given).disk_memory_bytes < latent.disk_memory_bytes
    with pytest.raises(InvalidValueError, match=r"--cache-disk 1 MiB: at least 2 MiB \(for each of 2 ranks 1 MiB, and"):
        plan(cache_disk_bytes=MIB, tp_size=2, device="cpu")


def test_every_rank_has_the_host_tier_of_latents_and_its_part_of_keys_and_values() -> None:
    for config, factor in ((LATENT, 2), (TINY, 1)):
        tiers = plan(config, max_total_tokens=1024, cache_disk_bytes=8 * MIB, tp_size=2, device="cpu")
        needs = plan_memory(config, ServingShape(max_total_tokens=1024, cache=tiers, ranks=2)).needs
        (host,) = (need for need in needs if need.what == "prefix cache's host tier")
        assert host.size_bytes == factor * tiers.host_bytes


def test_memory_holds_the_host_tier_and_the_disks_buffers_and_says_what_to_lower() -> None:
    tiers = plan(max_total_tokens=1024, cache_host_bytes=3 * MIB, cache_disk_bytes=96 * MIB)
    shape = ServingShape(max_total_tokens=1024, cache=tiers)
    needs = {need.what: need for need in plan_memory(TINY, shape).needs}
    host, disk = needs["prefix cache's host tier"], needs["prefix cache's disk buffers and index"]
    assert (host.size_bytes, host.device, host.lower) == (3 * MIB, "cpu", ("--cache-host",))
    assert disk.size_bytes == 512 * MIB + 2048 * INDEX_BYTES and disk.device == "cpu"
    assert needs["KV cache"].size_bytes == (1024 + 64) * 768
    on_gpu = plan_memory(TINY, ServingShape(device="gpu", max_total_tokens=1024, cache=tiers)).needs
    assert [need.device for need in on_gpu if "prefix cache" in need.what] == ["cpu", "cpu"]
    (staged,) = (need for need in on_gpu if "on their way" in need.what)
    assert (staged.device, staged.size_bytes) == ("gpu", 64 * tiers.page_bytes)
    assert not [what for what in needs if "on their way" in what]


def device_pool(plan: CachePlan, config: Any, dtype: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    common: dict[str, Any] = {
        "size": plan.device_tokens,
        "page_size": plan.page_tokens,
        "dtype": dtype,
        "layer_num": config["num_hidden_layers"],
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if "kv_lora_rank" in config:
        ranks = {name: config[name] for name in ("kv_lora_rank", "qk_rope_head_dim")}
        return MLATokenToKVPool(**common, **ranks)
    return MHATokenToKVPool(**common, head_num=config["num_key_value_heads"], head_dim=config["head_dim"])


def host_pool(plan: CachePlan, config: Any, device: Any) -> Any:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    layers = config["num_hidden_layers"]
    kind, more = (
        (MLATokenToKVPoolHost, {"target_layer_num": layers}) if "kv_lora_rank" in config else (MHATokenToKVPoolHost, {})
    )
    return kind(
        device.get_device_pool_infos()[0].buffer_info,
        plan.host_ratio,
        0,
        plan.page_tokens,
        "page_first_direct",
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=layers,
        **more,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("config", [TINY, LATENT], ids=["grouped", "latent"])
def test_sglangs_pools_take_the_bytes_that_the_plan_says(
    config: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from sglang.srt.mem_cache.pool_host import base

    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    tiers = plan(config, dtype=dtype, max_total_tokens=1000, cache_host_bytes=3 * MIB, cache_disk_bytes=64 * MIB)
    device = device_pool(tiers, config, getattr(torch, dtype))
    host = host_pool(tiers, config, device)
    assert (host.size, host.page_num) == (tiers.host_tokens, tiers.host_tokens // tiers.page_tokens)
    assert host.size_per_token == tiers.token_bytes
    assert host.kv_buffer.nbytes == tiers.host_bytes
    pointers, sizes = host.get_page_buffer_meta(host.alloc(tiers.page_tokens))
    assert sum(sizes) == tiers.page_bytes and len(pointers) == len(sizes)
    shape = ServingShape(
        max_total_tokens=tiers.device_tokens, activation_bytes=getattr(torch, dtype).itemsize, cache=tiers
    )
    (cache,) = (need for need in plan_memory(config, shape).needs if need.what == "KV cache")
    buffers = [*getattr(device, "k_buffer", []), *getattr(device, "v_buffer", []), *getattr(device, "kv_buffer", [])]
    assert sum(buffer.nbytes for buffer in buffers) == cache.size_bytes


@pytest.mark.parametrize("page_tokens", [1, 2, 16, 64, 1024])
@pytest.mark.parametrize("pages", [(4, 5), (7, 100), (1000, 1001), (16384, 3 * 16384), (10, 123457)])
def test_the_ratio_gives_exactly_the_pages_of_the_plan(page_tokens: int, pages: tuple[int, int]) -> None:
    device, host = (count * page_tokens for count in pages)
    ratio = CachePlan(page_tokens, 768, device, host, 0, None).host_ratio
    assert int(device * ratio) // page_tokens + 1 == pages[1]
