"""What is stored, found again, evicted and refused."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from reference.cache.files import FaultyFiles, key_of
from reference.cache.stores import NAMESPACE, QUOTA, ROOT, SIZE, open_store, present, segment_of, write

from kt_runtime.cache.format import FILE_HEADER_BYTES, slot_bytes_for
from kt_runtime.cache.page_store import PageStore
from kt_runtime.errors import ConflictError, InvalidValueError, NotFoundError


def test_what_is_written_is_read_also_after_a_restart() -> None:
    files = FaultyFiles()
    store = open_store(files)
    assert write(store, range(20)) == 20
    assert present(store, range(30)) == list(range(20))
    store.close()
    store = open_store(files)
    assert present(store, range(30)) == list(range(20))
    assert store.counters["hits"] == 20
    assert store.counters["misses"] == 10
    assert store.counters["bytes_read"] == 20 * SIZE
    assert store.counters["corrupt"] == 0


def test_a_second_writer_is_refused_by_name() -> None:
    files = FaultyFiles()
    open_store(files)
    with pytest.raises(ConflictError, match="in use by process"):
        open_store(files)


def test_a_second_server_may_read() -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(5))
    reader = open_store(files, read_only=True)
    assert present(reader, range(5)) == list(range(5))
    assert write(reader, range(9)) == 0
    segment_of(files)[FILE_HEADER_BYTES + 600] ^= 1
    assert present(reader, [0]) == []
    assert not files.names(ROOT / "quarantine")


def test_a_reader_needs_a_cache() -> None:
    files = FaultyFiles()
    files.make_directory(ROOT)
    with pytest.raises(NotFoundError, match="no cache directory"):
        open_store(files, read_only=True)
    with pytest.raises(NotFoundError, match="does not exist"):
        PageStore(Path("/nowhere"), QUOTA, NAMESPACE, files=files, read_only=True)


def test_a_quota_too_small_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="cache quota: 1000 bytes; allowed: 1048576"):
        PageStore(ROOT, 1000, NAMESPACE, files=FaultyFiles())


def test_another_namespace_is_a_miss_and_shares_the_directory() -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(5))
    store.close()
    other = PageStore(ROOT, QUOTA, b"o" * 16, files=files)
    assert present(other, range(5)) == []
    write(other, range(3))
    other.close()
    assert present(open_store(files), range(6)) == list(range(5))


@pytest.mark.parametrize("damage", ["bit", "zeros", "cut", "empty"])
def test_a_damaged_record_is_a_miss_counted_and_quarantined(damage: str) -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(3))
    data = segment_of(files)
    slot = slot_bytes_for(SIZE)
    if damage == "bit":
        data[FILE_HEADER_BYTES + 2 * slot + 1000] ^= 4
    elif damage == "zeros":
        data[FILE_HEADER_BYTES + 2 * slot : FILE_HEADER_BYTES + 3 * slot] = bytes(slot)
    elif damage == "cut":
        del data[FILE_HEADER_BYTES + 2 * slot + 777 :]
    else:
        del data[FILE_HEADER_BYTES + 2 * slot :]
    assert present(store, range(3)) == [0, 1]
    assert store.counters["corrupt"] == 1
    assert len(files.names(ROOT / "quarantine")) == 1
    assert present(store, range(3)) == [0, 1]
    assert store.counters["corrupt"] == 1  # it is forgotten
    write(store, [2])
    assert present(store, range(3)) == [0, 1, 2]


def test_a_segment_made_empty_is_used_again_and_found_after_a_restart() -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(3))
    segment_of(files).clear()
    assert present(store, range(3)) == []
    write(store, range(3))
    store.close()
    store = open_store(files)
    assert present(store, range(3)) == [0, 1, 2]
    assert store.counters["corrupt"] == 0


def test_records_swapped_with_each_other_are_misses() -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(3))
    data, slot = segment_of(files), slot_bytes_for(SIZE)
    first, second = (
        data[FILE_HEADER_BYTES : FILE_HEADER_BYTES + slot],
        data[FILE_HEADER_BYTES + slot : FILE_HEADER_BYTES + 2 * slot],
    )
    data[FILE_HEADER_BYTES : FILE_HEADER_BYTES + 2 * slot] = second + first
    assert present(store, range(3)) == [2]
    assert store.counters["corrupt"] == 2


def test_a_page_of_another_length_is_a_miss() -> None:
    store = open_store(FaultyFiles())
    write(store, range(2))
    assert present(store, [0], 100) == []
    assert present(store, [1], SIZE - 8) == []  # the same size of slot
    assert store.counters["corrupt"] == 2


@pytest.mark.parametrize("place", [0, 5, 9])
def test_a_segment_of_another_format_is_quarantined(place: int) -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(3))
    store.close()
    segment_of(files)[place] ^= 1
    store = open_store(files)
    assert present(store, range(3)) == []
    assert store.counters["corrupt"] == 1
    assert write(store, range(3)) == 3
    assert present(store, range(3)) == [0, 1, 2]


def test_what_is_no_file_does_not_keep_a_cache_from_being_opened(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "cache", QUOTA, NAMESPACE)
    write(store, range(3))
    store.close()
    segments = tmp_path / "cache" / "segments"
    (segments / "00000007.seg").symlink_to(tmp_path / "elsewhere")
    (segments / "00000008.seg").symlink_to(tmp_path)
    (segments / "00000009.seg").mkdir()
    for num_foreign in (3, 0):
        store = PageStore(tmp_path / "cache", QUOTA, NAMESPACE)
        assert store.counters["corrupt"] == num_foreign
        assert present(store, range(3)) == [0, 1, 2]
        store.close()
    assert write(PageStore(tmp_path / "cache", QUOTA, NAMESPACE), range(3, 203)) == 200


@pytest.mark.parametrize("damage", ["gone", "bit", "garbage", "empty"])
def test_a_damaged_index_costs_no_record(damage: str) -> None:
    files = FaultyFiles()
    store = open_store(files)
    for start in range(0, 30, 5):
        write(store, range(start, start + 5))
    store.close()
    index = files.files[ROOT / "index.log"].data
    if damage == "gone":
        del files.files[ROOT / "index.log"]
    elif damage == "bit":
        index[40] ^= 1
    elif damage == "garbage":
        index[:] = os.urandom(len(index))
    else:
        index.clear()
    store = open_store(files)
    assert present(store, range(30)) == list(range(30))
    store.close()
    assert present(open_store(files), range(30)) == list(range(30))


def test_the_quota_holds_and_the_oldest_go_first() -> None:
    files = FaultyFiles()
    store = open_store(files)
    for number in range(0, 600, 3):
        write(store, [number + 2, number + 1, number])
        assert files.used_bytes(ROOT) <= QUOTA
    assert files.used_bytes(ROOT) >= QUOTA * 0.95
    found = present(store, range(600))
    assert found == list(range(600 - len(found), 600))
    assert store.counters["evictions"] == 600 - len(found)


def test_the_order_of_use_survives_a_restart() -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(100))
    store.use([key_of(number) for number in (99, 98, 97)])
    store.close()
    store = open_store(files)
    records = store.records()
    assert len(records) == 100
    for number in range(100, 100 + 300):
        write(store, [number])
        store.use([key_of(number) for number in (99, 98, 97)])
    assert present(store, range(100)) == [97, 98, 99]


def test_opening_a_full_cache_again_evicts_nothing() -> None:
    files = FaultyFiles()
    store = open_store(files)
    for start in range(0, 1000, 10):
        write(store, range(start, start + 10))
    before = store.records()
    for _ in range(3):
        store.close()
        store = open_store(files)
        assert store.records() == before


def test_of_a_prefix_the_end_goes_before_the_beginning() -> None:
    store = open_store(FaultyFiles())
    write(store, range(100))
    store.use([key_of(number) for number in range(100)])
    write(store, range(1000, 1150))
    found = present(store, range(100))
    assert 0 < len(found) < 100
    assert found == list(range(len(found)))


def test_a_smaller_quota_is_kept_from_the_beginning() -> None:
    files = FaultyFiles()
    store = PageStore(ROOT, 4 * QUOTA, NAMESPACE, files=files)
    write(store, range(900))
    store.close()
    store = open_store(files)
    assert files.used_bytes(ROOT) <= QUOTA
    assert len(store) > 0
    assert present(store, range(900)) != []
    assert store.counters["corrupt"] == 0


def test_an_older_size_of_page_makes_room_for_the_new_one() -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(300))
    assert write(store, range(1000, 1010), 40_000) == 10
    assert present(store, range(1000, 1010), 40_000) == list(range(1000, 1010))
    assert files.used_bytes(ROOT) <= QUOTA


def test_a_page_larger_than_the_quota_is_dropped() -> None:
    store = open_store(FaultyFiles())
    write(store, range(3))
    assert write(store, [7], 2 * QUOTA) == 0
    assert store.counters["dropped"] == 1
    assert present(store, range(3)) == [0, 1, 2]


def test_writing_again_writes_nothing() -> None:
    store = open_store(FaultyFiles())
    assert write(store, [1, 2, 1]) == 3
    assert write(store, [2, 3]) == 2
    assert store.counters["records_written"] == 3


def test_a_directory_that_was_removed_or_emptied_is_noticed() -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(3))
    assert store.is_in_place()
    files.remove_tree(ROOT)
    assert not store.is_in_place()
    files.make_directory(ROOT / "segments")
    assert not store.is_in_place()
    store.abandon()
    assert present(store, range(3)) == []


def test_clearing_leaves_nothing() -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(100))
    assert store.clear() == 100
    assert present(store, range(100)) == []
    assert files.used_bytes(ROOT) < 1000
    write(store, range(3))
    store.close()
    assert present(open_store(files), range(100)) == [0, 1, 2]


def test_checking_finds_every_damaged_record() -> None:
    files = FaultyFiles()
    store = open_store(files)
    write(store, range(10))
    for slot in (2, 5):
        segment_of(files)[FILE_HEADER_BYTES + slot * slot_bytes_for(SIZE) + 2000] ^= 1
    faults = [store.check_record(record) for record in store.records()]
    assert len([fault for fault in faults if fault]) == 2
    assert present(store, range(10)) == [0, 1, 3, 4, 6, 7, 8, 9]


def test_readers_and_the_writer_do_not_disturb_each_other(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "cache", QUOTA, NAMESPACE)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            present(store, range(0, 400, 7))

    pool = ThreadPoolExecutor(3)
    readers = [pool.submit(read) for _ in range(3)]
    for _ in range(6):
        for start in range(0, 400, 8):
            write(store, range(start, start + 8))
    stop.set()
    for reader in readers:
        reader.result()
    assert store.counters["corrupt"] == 0
    assert store.counters["hits"] > 0
    used = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
    assert used <= QUOTA
    store.close()
    assert oct((tmp_path / "cache").stat().st_mode)[-3:] == "700"
