"""The store when it is killed, when the power is cut, and when the disk refuses."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.cache.files import Crash, Fail, FaultyFiles
from reference.cache.stores import QUOTA, ROOT, open_store, present, write


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 60), st.booleans(), st.booleans())
def test_a_kill_at_any_write_loses_at_most_what_was_in_flight(write_number: int, power: bool, torn: bool) -> None:
    files = FaultyFiles()
    store = open_store(files)
    done: list[int] = []
    synced = 0
    if torn:
        files.tear_at = write_number
    else:
        calls = iter(range(10**9))

        def crash(operation: str, path: Path) -> None:
            if operation in ("write", "sync", "rename", "sync_directory") and next(calls) == write_number:
                raise Crash

        files.before = crash
    try:
        for start in range(0, 60, 4):
            write(store, range(start, start + 4))
            done += range(start, start + 4)
            if start % 12 == 0:
                store.sync()
                synced = len(done)
    except Crash:
        pass
    files.kill()
    if power:
        files.power_cut()
    store = open_store(files)
    found = present(store, range(64))
    assert found[:synced] == done[:synced]
    if not power:
        assert found[: len(done)] == done
        assert set(found) <= {*done, *range(len(done), len(done) + 4)}
    assert write(store, range(64)) == 64
    assert present(store, range(64)) == list(range(64))
    assert files.used_bytes(ROOT) <= QUOTA


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 200))
def test_a_kill_while_slots_are_used_again_never_gives_a_wrong_page(write_number: int) -> None:
    files = FaultyFiles()
    store = open_store(files)
    files.tear_at = files.num_writes + write_number
    try:
        for start in range(0, 600, 6):
            write(store, range(start, start + 6))
    except Crash:
        pass
    files.kill()
    store = open_store(files)
    present(store, range(600))  # asserts that what is found is right
    assert write(store, [9999]) == 1
    assert present(store, [9999]) == [9999]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_failed_write_raises_and_the_next_one_works(number: int) -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(5))
    fault = Fail(number, "write")
    files.before = fault
    with pytest.raises(OSError, match="Errno"):
        write(store, range(5, 10))
    fault.is_on = False
    assert present(store, range(10)) == list(range(5))
    assert write(store, range(5, 12)) == 7
    store.close()
    assert present(open_store(files), range(12)) == list(range(12))


def test_an_index_that_could_not_be_written_is_written_whole_later() -> None:
    files = FaultyFiles()
    store = open_store(files)

    def fail(operation: str, path: Path) -> None:
        if operation == "write" and path.name.endswith("index.log"):
            raise OSError(errno.ENOSPC, "No space left on device")

    files.before = fail
    for start in (0, 5):
        with pytest.raises(OSError, match="No space"):
            write(store, range(start, start + 5))
    files.before = lambda operation, path: None
    write(store, range(10, 15))
    files.kill()
    assert present(open_store(files), range(15)) == list(range(15))


def test_a_segment_that_could_not_be_removed_is_removed_later() -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(300))
    fault = Fail(errno.EROFS, "remove")
    files.before = fault
    for _ in range(3):
        with pytest.raises(OSError, match="Errno"):
            write(store, range(1000, 1010), 40_000)
    fault.is_on = False
    assert write(store, range(1000, 1010), 40_000) == 10
    assert files.used_bytes(ROOT) <= QUOTA
    store.close()
    names = files.names(ROOT / "segments")
    assert present(open_store(files), range(1000, 1010), 40_000) == list(range(1000, 1010))
    assert files.names(ROOT / "segments") == names


def test_a_read_that_fails_is_an_error_and_no_damage() -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(5))
    fault = Fail(errno.EIO, "read")
    files.before = fault
    with pytest.raises(OSError, match="Errno"):
        present(store, range(5))
    fault.is_on = False
    assert present(store, range(5)) == list(range(5))
    assert store.counters["read_errors"] == 1
    assert store.counters["corrupt"] == 0
