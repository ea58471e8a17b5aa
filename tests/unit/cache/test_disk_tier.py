"""The tier in front of a disk that works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from reference.cache.files import key_of, page_to_read, page_to_write
from reference.cache.tiers import SIZE, keys, present, settings, write

from kt_runtime.cache.disk_tier import DiskTier
from kt_runtime.cache.format import Namespace
from kt_runtime.cache.page import Page
from kt_runtime.errors import ConflictError, InvalidValueError


def test_pages_come_back_before_and_after_they_are_written_and_after_a_restart(
    open_tier: Callable[..., DiskTier],
) -> None:
    tier = open_tier()
    assert write(tier, range(40)) == [True] * 40
    assert tier.look_up(keys(range(50))) == 40
    assert present(tier, range(50)) == 40
    assert tier.flush(60.0)
    assert present(tier, range(50)) == 40
    tier.close()
    tier = open_tier()
    assert tier.look_up(keys(range(50))) == 40
    assert present(tier, range(40)) == 40
    status = tier.status()
    assert status["hits"] == 40
    assert status["bytes_read"] == 40 * SIZE
    assert status["read_ahead"] == 40
    assert status["misses"] == 10
    assert status["records"] == 40


def test_a_prefix_is_counted_to_its_first_hole(open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier()
    write(tier, range(3))
    write(tier, range(4, 9))
    assert tier.look_up(keys(range(9))) == 3
    assert present(tier, range(9)) == 3
    assert tier.flush(60.0)
    assert tier.look_up(keys(range(9))) == 3
    assert present(tier, range(9)) == 3


def test_reading_more_than_there_is_memory_for(open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier(read_memory_bytes=5 * SIZE, write_memory_bytes=200 * SIZE)
    write(tier, range(100))
    assert tier.flush(60.0)
    assert tier.look_up(keys(range(100))) == 100
    assert present(tier, range(100)) == 100
    assert tier.look_up(keys(range(50))) == 50  # nobody comes for them
    assert present(tier, range(50, 100)) == 50


def test_the_head_of_a_prefix_outlives_its_end(open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier()
    chain = keys(range(60))
    for start in range(0, 60, 20):
        tier.write([page_to_write(number) for number in range(start, start + 20)], chain[:start])
    for start in range(1000, 1170, 10):
        write(tier, range(start, start + 10))
        tier.flush()
    found = tier.look_up(chain)
    assert 0 < found < 60
    assert [page for page in range(found, 60) if tier.look_up([key_of(page)])] == []


def test_two_servers_cannot_write_to_one_directory(open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier()
    write(tier, range(5))
    assert tier.flush(60.0)
    with pytest.raises(ConflictError, match="in use by process"):
        open_tier()
    reader = open_tier(read_only=True)
    assert present(reader, range(5)) == 5
    assert write(reader, range(5)) == [False] * 5


def test_a_setting_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="cache quota: 4096 bytes; allowed: 1048576"):
        settings(quota_bytes=4096)
    with pytest.raises(InvalidValueError, match="patience_s: 0"):
        settings(patience_s=0)


def test_what_a_client_would_see_of_another_model_is_nothing(open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier()
    write(tier, range(5))
    tier.close()
    other = Namespace(weights="other", kv_dtype="bfloat16", page_tokens=64, layout="page_first_direct")
    tier = open_tier(namespace=other)
    assert tier.look_up(keys(range(5))) == 0
    assert present(tier, range(5)) == 0


def test_clearing_a_cache_in_use(open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier()
    write(tier, range(5))
    assert tier.clear()
    assert tier.look_up(keys(range(5))) == 0
    write(tier, range(3))
    assert tier.flush(60.0)
    assert present(tier, range(5)) == 3


def test_a_page_that_no_record_can_hold_is_dropped_not_raised(open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier()
    odd = [page_to_write(2, SIZE + 8), page_to_write(3)]
    assert tier.write([page_to_write(1), *odd]) == [True, False, False]
    assert tier.write([Page(b"k" * 97, page_to_write(1).pieces)]) == [False]
    assert tier.write([Page(b"k\0", page_to_write(1).pieces)]) == [False]
    assert tier.flush(60.0)
    assert tier.read([page_to_read(1), page_to_read(2, SIZE + 8), page_to_read(3)]) == [True, False, False]
    assert tier.status()["dropped"] == 4
    assert tier.look_up([b"k" * 97]) == 0
