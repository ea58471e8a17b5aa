"""Memory that is given back in pieces, on a thread of its own."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from kt_runtime import mapped as module
from kt_runtime.mapped import PIECE_BYTES, array_of, commit, free_elsewhere, give_pages_back, mapped


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """(address, bytes, thread) of every call of madvise(2), which happens nevertheless."""
    calls: list[tuple[int, int, str]] = []
    real = module._madvise()

    def noted(address: Any, size: Any, advice: Any) -> int:
        calls.append((address.value, size.value, threading.current_thread().name))
        answer: int = real(address, size, advice)
        return answer

    monkeypatch.setattr(module, "_madvise", lambda: noted)
    return calls


def resident_pages(memory: mmap.mmap) -> int:
    """Of the process's pages (mincore(2))."""
    pages = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(memory)), pages) == 0
    return sum(each & 1 for each in pages)


@pytest.mark.parametrize(("begin", "num_bytes", "expected"), [(0, 64, 64), (1, 64, 64), (1, 16, 1), (0, 15, 1)])
def test_whole_pages_are_committed_at_once_and_keep_their_contents(begin: int, num_bytes: int, expected: int) -> None:
    """`num_bytes`, `expected`: in pages. The first one is written before. A few are not worth a system call."""
    memory = mapped(128 * mmap.PAGESIZE)
    memory[:5] = b"first"
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    commit(start + begin, num_bytes * mmap.PAGESIZE)
    assert resident_pages(memory) in (expected, 1)  # 1: an older system
    assert memory[:6] == b"first\0"


def wait_for_free() -> None:
    """What was handed over before is free."""
    ended = threading.Event()

    class Last:
        pass

    last = Last()
    weakref.finalize(last, ended.set)
    free_elsewhere(last)
    del last
    assert ended.wait(60)


def test_what_is_freed_elsewhere_is_freed_by_another_thread() -> None:
    class Large:
        pass

    ended, freed_by = threading.Event(), []

    def note() -> None:
        freed_by.append(threading.current_thread().name)
        ended.set()

    large = Large()
    weakref.finalize(large, note)
    free_elsewhere(large, None)
    del large
    assert ended.wait(60) and freed_by == ["kt-free"]


def test_pages_are_given_back_in_pieces_and_only_whole_ones(advised: list[tuple[int, int, str]]) -> None:
    memory = mapped(5 * PIECE_BYTES)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 7
    begin, end = 3, 4 * PIECE_BYTES + mmap.PAGESIZE + 5
    give_pages_back(memory, begin, end)
    assert (array[: mmap.PAGESIZE] == 7).all()
    assert not array[mmap.PAGESIZE : end - 5].any()
    assert (array[end - 5 :] == 7).all()
    assert max(size for _, size, _ in advised) <= PIECE_BYTES
    assert sum(size for _, size, _ in advised) == end - 5 - mmap.PAGESIZE


def test_no_whole_page_is_no_call(advised: list[tuple[int, int, str]]) -> None:
    memory = mapped(2 * mmap.PAGESIZE)
    np.frombuffer(memory, np.uint8)[:] = 7
    give_pages_back(memory, 1, mmap.PAGESIZE)
    assert advised == [] and memory[:] == b"\7" * len(memory)


def test_memory_is_given_back_after_its_last_view_by_the_thread_for_it(advised: list[tuple[int, int, str]]) -> None:
    array = array_of(mapped(3 * PIECE_BYTES))
    array[:] = 1
    view = array.data[PIECE_BYTES:]
    del array
    gc.collect()
    wait_for_free()
    assert advised == [] and view[0] == 1
    del view
    wait_for_free()
    assert [(size, thread) for _, size, thread in advised] == [(PIECE_BYTES, "kt-free")] * 3
