"""How a request's tokens become pages of tiers; that SGLang calls us at all is in tests/system."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.cache.disk import Counters
from kt_runtime.sglang_patch.cache import metrics as cache_metrics
from kt_runtime.wire.status import CacheTier


class Request(SimpleNamespace):
    def _compute_max_prefix_len(self, input_len: int) -> int:
        return input_len - 1


def request(prompt_tokens: int = 200, **values: Any) -> Request:
    tiers = {"cached_tokens_device": 0, "cached_tokens_host": 0, "cached_tokens_storage": 0}
    fields = {"origin_input_ids": [1] * prompt_tokens, "_cache_breakdown_computed": True, **tiers, **values}
    return Request(**fields)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[Counters, Counters]:
    counters = Counters(cache_metrics._NAMES), Counters(cache_metrics._NAMES)
    monkeypatch.setattr(cache_metrics, "_device", counters[0])
    monkeypatch.setattr(cache_metrics, "_host", counters[1])
    return counters


def batch(*requests: Request, has_host: bool = True) -> SimpleNamespace:
    tree = SimpleNamespace(page_size=16, cache_controller=object() if has_host else None)
    return SimpleNamespace(reqs=list(requests), tree_cache=tree)


def test_what_a_tier_misses_the_next_one_is_asked_for(counted: tuple[Counters, Counters]) -> None:
    asked = request(_cache_breakdown_computed=False)

    def prepare(_: Any) -> str:
        asked.cached_tokens_device, asked.cached_tokens_host, asked._cache_breakdown_computed = 64, 96, True
        return "prepared"

    known = request(cached_tokens_device=192)
    assert cache_metrics._count_hits(prepare, batch(asked, known)) == "prepared"  # the second was counted before
    device, host = counted
    assert (device["hits"], device["misses"]) == (4, 8)
    assert (host["hits"], host["misses"]) == (6, 2)


def test_a_request_that_was_taken_back_is_counted_when_it_is_decided(counted: tuple[Counters, Counters]) -> None:
    cache_metrics._count_hits(lambda _: None, batch(request(_cache_breakdown_computed=False)))
    assert counted[0]["misses"] == 0


def test_without_a_host_tier_only_the_device_is_asked(counted: tuple[Counters, Counters]) -> None:
    cache_metrics._count_request(request(17), batch(has_host=False).tree_cache)
    cache_metrics._count_request(request(16), batch(has_host=False).tree_cache)  # no whole page before the last token
    assert (counted[0]["misses"], counted[1]["misses"]) == (1, 0)


@pytest.mark.parametrize(
    ("result", "with_disk", "expected"),
    [
        (None, False, {"device": 0, "host": 0, "computed": 200}),
        (None, True, {"device": 0, "host": 0, "storage": 0, "storage_backend": "kt-runtime disk", "computed": 200}),
        (
            {"device": 64, "host": 0, "storage": 128, "storage_backend": "DiskBackend"},
            True,
            {"device": 64, "host": 0, "storage": 128, "storage_backend": "kt-runtime disk", "computed": 8},
        ),
    ],
)
def test_meta_info_names_every_tier_that_there_is(
    result: dict[str, int | str] | None, with_disk: bool, expected: dict[str, int | str]
) -> None:
    streamer = SimpleNamespace(enable_hicache_storage=lambda: with_disk)
    assert cache_metrics.describe_cached_tokens(result, streamer, request()) == expected


def disk(rank: int, **values: Any) -> CacheTier:
    faults = dict.fromkeys(cache_metrics.FAULTS, rank + 1)
    fields: dict[str, Any] = {
        "page_tokens": 16,
        "page_bytes": 64,
        "used_bytes": 640,
        "capacity_bytes": 6400,
        "hits": 7,
        "misses": 0,
    }
    fields |= {"pages": 10 + rank, "evictions": 0, "counters": {"hits": 7, "cleared": rank, **faults}}
    return CacheTier(tier="disk", directory=f"/c/rank-{rank}-of-2", corrupt=rank + 1, **fields, **values)


def test_pages_are_those_of_rank_0_and_faults_are_those_of_all_ranks() -> None:
    both = cache_metrics.with_faults_of({1: disk(1, writing_stopped="No space left on device")}, disk(0))
    assert (both.pages, both.used_bytes, both.hits, both.directory) == (10, 640, 7, "/c")
    assert both.counters == {"hits": 7, "cleared": 0, **dict.fromkeys(cache_metrics.FAULTS, 3)}
    assert both.corrupt == 3
    assert (both.reading_stopped, both.writing_stopped) == (None, "rank 1: No space left on device")
    assert cache_metrics.with_faults_of({}, disk(0)) == disk(0)


def test_a_rank_keeps_what_the_others_tell_and_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_metrics, "_others", {2: disk(1)})
    cache_metrics.told({0: disk(0), 1: disk(1)})
    assert cache_metrics._others == {1: disk(1)}
