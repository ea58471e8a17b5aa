"""What `bench cache` compares with what, without a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.bench.cache import bandwidth, system_cache
from kt_runtime.bench.cache.first_token import check_tier
from kt_runtime.bench.cache.plan import Plan
from kt_runtime.bench.cache.round import MEASURES, Round, TierFiles
from kt_runtime.cache.format import HEADER_BYTES
from kt_runtime.errors import InvalidValueError, KtError, RuntimeFault

PAGE_BYTES = 16 << 10


def test_both_sides_move_the_same_bytes_and_leave_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    result = bandwidth.measure(PAGE_BYTES, 40 * PAGE_BYTES, 3, tmp_path, said.append)
    found = result.as_json()
    assert (found["pages"], found["bytes"], found["page_bytes"]) == (40, 40 * PAGE_BYTES, PAGE_BYTES)
    assert found["record_bytes"] >= PAGE_BYTES + HEADER_BYTES
    assert found["bytes_per_s"].keys() == found["best_bytes_per_s"].keys() == set(MEASURES)
    assert all(len(rates) == 3 for rates in found["rounds_bytes_per_s"].values())
    assert len(found["cached_shares"]) == len(said) == 3
    for use in ("read", "write"):
        ratio = found["bytes_per_s"][f"tier_{use}"] / found["bytes_per_s"][f"plain_{use}"]
        assert result.ratio(use) == pytest.approx(
            ratio, rel=1e-15, abs=0
        )  # the same two times, divided in another order
    assert not list(tmp_path.rglob("*.seg")) and not (tmp_path / "plain").exists()


def test_bytes_that_do_not_come_back_are_no_figure(tmp_path: Path) -> None:
    source, target = bytearray(os.urandom(8 * PAGE_BYTES)), bytearray(8 * PAGE_BYTES)
    with TierFiles(tmp_path / "tier", PAGE_BYTES, 8) as tier:
        one = Round(memoryview(source), memoryview(target), tmp_path / "plain", tier, is_tier_first=True)
        tier.write(one.source)
        assert one._read_tier() > 0
        source[5 * PAGE_BYTES + 77] ^= 1
        with pytest.raises(RuntimeFault, match="not what was written"):
            one._read_tier()
        (segment,) = (path for path in tier.paths() if path.suffix == ".seg")
        with segment.open("r+b") as file:
            file.seek(segment.stat().st_size // 2)
            file.write(b"damaged")
        with pytest.raises(RuntimeFault, match="not read a page"):
            one._read_tier()


def test_what_is_dropped_from_the_system_s_cache_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    before = system_cache.cached_share(path)
    system_cache.drop(path)
    after = system_cache.cached_share(path)
    if before is not None and system_cache.file_system(tmp_path) != "tmpfs":
        assert before == 1.0 and after == 0.0
        system_cache.fill(path)
        assert system_cache.cached_share(path) == 1.0
    assert system_cache.cached_share() == 0.0


def details(**tokens: int) -> dict[str, Any]:
    return {"cached_tokens_details": {"device": 0, "host": 0, "storage": 0, "storage_backend": "a disk", **tokens}}


def test_a_sample_counts_only_where_one_tier_served_all_of_it() -> None:
    check_tier(details(storage=128), "storage", 128)
    check_tier(details(), None, 128)
    check_tier({}, None, 128)
    wrong = [
        (details(device=128), "host"),
        (details(device=64, host=64), "host"),
        (details(storage=64), "storage"),
        (details(device=64), None),
        ({}, "device"),
    ]
    for meta_info, tier in wrong:
        with pytest.raises(RuntimeFault, match="128 tokens of a prompt should be"):
            check_tier(meta_info, tier, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 100}, "--tokens is 100; must be a multiple of --page-tokens, which is 64"),
        ({"tokens": 0}, "--tokens is 0"),
        ({"page_tokens": 0}, "--page-tokens is 0"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"bandwidth_bytes": 0}, "--bandwidth-bytes is 0"),
        ({"directory": Path("nowhere")}, "--directory nowhere"),
        ({"dtype": "bfloat61"}, "bfloat16"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KtError, match=message):
        Plan(**changes)
    assert issubclass(InvalidValueError, KtError)
