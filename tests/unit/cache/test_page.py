"""Memory for pages: bounded, used again, and where reading a file into it is fast."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading

import pytest

from kt_runtime.cache.disk import Counters, Health
from kt_runtime.cache.page import BufferPool, Page
from kt_runtime.cache.write_behind import WriteBehind


def address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@pytest.mark.parametrize(("size", "unit"), [(100, 64), (64, 64), (4096, mmap.PAGESIZE), (786_432 + 8, mmap.PAGESIZE)])
def test_buffers_begin_on_cache_lines_and_large_ones_on_pages(size: int, unit: int) -> None:
    pool = BufferPool(8 * size)
    buffers = [pool.take(size) for _ in range(8)]
    starts = sorted(address(buffer) for buffer in buffers if buffer is not None)
    assert len(starts) == 8
    assert all(start % unit == 0 for start in starts)
    assert all(second - first >= size for first, second in itertools.pairwise(starts))


def test_no_more_than_the_limit_is_out_and_what_comes_back_is_used_again() -> None:
    pool = BufferPool(1000)
    taken = [pool.take(300) for _ in range(4)]
    assert [buffer is not None for buffer in taken] == [True, True, True, False]
    assert pool.take(2000) is None
    first = taken[0]
    assert first is not None
    threading.Timer(0.05, pool.give_back, [first]).start()
    again = pool.take(300, 10.0)
    assert again is not None and address(again) == address(first)


def test_sizes_that_are_in_use_no_more_make_room() -> None:
    pool = BufferPool(1 << 20)
    for size in (1 << 18, 3000, 1 << 19, 100):
        for _ in range(3):
            buffers = [pool.take(size) for _ in range((1 << 20) // size)]
            assert all(buffers)
            for buffer in buffers:
                assert buffer is not None
                pool.give_back(buffer)
    assert pool.take(1 << 20) is not None, "nothing is out: the whole limit is there"


def test_a_page_offered_twice_in_a_call_takes_memory_once_and_gives_it_back() -> None:
    written: list[bytes] = []
    writer = WriteBehind(
        lambda pages, chain: written.extend(page.key for page in pages),
        lambda: None,
        memory_bytes=2 * 64,
        interval_s=1.0,
        patience_s=60.0,
        health=Health("a disk"),
        counters=Counters(),
    )
    for number in range(5):
        page = Page(b"page-%d" % number, [bytearray(64)])
        assert writer.offer([page, page], [page.key]) == 2
        assert writer.flush(60.0)
    assert written == [b"page-%d" % number for number in range(5)]
    assert writer.close(60.0)
