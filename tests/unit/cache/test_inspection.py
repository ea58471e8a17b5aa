from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from reference.cache.files import FaultyFiles, page_to_write
from reference.cache.stores import segment_of

from kt_runtime.cache import inspection
from kt_runtime.cache.format import FILE_HEADER_BYTES, slot_bytes_for
from kt_runtime.cache.page_store import PageStore
from kt_runtime.errors import ConflictError, NotFoundError

ROOT = Path("/cache")


def cache_with(files: FaultyFiles, count: int) -> PageStore:
    store = PageStore(ROOT, 1 << 20, b"n" * 16, files=files)
    store.write([page_to_write(number) for number in range(count)])
    return store


def slot(number: int) -> int:
    return FILE_HEADER_BYTES + number * slot_bytes_for(4096)


def test_statistics_of_a_cache_in_use() -> None:
    files = FaultyFiles()
    store = cache_with(files, 7)
    found = inspection.statistics(ROOT, files)
    assert (found.records, found.slot_bytes) == (7, {slot_bytes_for(4096): 7})
    assert found.disk_bytes == files.used_bytes(ROOT)
    assert (found.quarantined, found.quarantined_bytes, found.holder) == ((), 0, "1")
    store.close()
    assert inspection.statistics(ROOT, files).holder is None


def test_statistics_while_a_segment_is_taken_away() -> None:
    files = FaultyFiles()
    store = cache_with(files, 7)

    def clear_meanwhile(operation: str, path: Path) -> None:
        if operation == "open" and path.suffix == ".seg":
            files.before = lambda operation, path: None
            store.clear()

    files.before = clear_meanwhile
    assert inspection.statistics(ROOT, files).records == 0


def test_verifying_finds_what_is_damaged_once() -> None:
    files = FaultyFiles()
    cache_with(files, 7).close()
    data = segment_of(files)
    data[slot(3) + 900] ^= 1
    data[slot(4) + 5] ^= 1
    seen: list[tuple[int, int]] = []
    found = inspection.verify(ROOT, files, lambda done, total: seen.append((done, total)))
    assert found.records == 7 and found.index_was_right
    assert found.faults == {
        "the payload does not match its checksum": 1,
        "the header is damaged or cut off": 1,
    }
    for damage in found.damaged:
        assert damage.kept_as == str(ROOT / "quarantine" / f"{damage.record}.bad")
        assert Path(damage.kept_as) in files.files
    total_bytes = 7 * slot_bytes_for(4096)
    assert [done for done, _ in seen] == [total_bytes * number // 7 for number in range(1, 8)]
    assert {total for _, total in seen} == {total_bytes}
    assert inspection.verify(ROOT, files) == inspection.Verification(5, (), True)
    assert inspection.statistics(ROOT, files).quarantined_bytes == 2 * slot_bytes_for(4096)


def test_records_that_went_with_their_segment_are_found() -> None:
    files = FaultyFiles()
    cache_with(files, 7).close()
    del segment_of(files)[slot(5) + 100 :]
    cut = inspection.verify(ROOT, files)
    assert (cut.records, cut.faults) == (6, {inspection.LOST: 1, "the header is damaged or cut off": 1})
    del segment_of(files)[:]
    emptied = inspection.verify(ROOT, files)
    assert (emptied.records, emptied.faults) == (0, {inspection.FOREIGN: 1, inspection.LOST: 5})
    assert emptied.damaged[0] == inspection.Damage(
        "00000001.seg", inspection.FOREIGN, str(ROOT / "quarantine" / "00000001.seg")
    )
    assert inspection.verify(ROOT, files).damaged == ()


def test_a_damaged_index_is_said_and_costs_no_record() -> None:
    files = FaultyFiles()
    store = cache_with(files, 5)
    store.write([page_to_write(number) for number in range(5, 9)])
    store.close()
    files.files[ROOT / "index.log"].data[40] ^= 1
    found = inspection.verify(ROOT, files)
    assert (found.records, found.damaged, found.index_was_right) == (9, (), False)
    assert inspection.verify(ROOT, files).index_was_right


def test_records_that_the_system_refuses_to_read_are_named_and_stay() -> None:
    files = FaultyFiles()
    cache_with(files, 3).close()

    def refuse(operation: str, path: Path) -> None:
        if operation == "read" and path.suffix == ".seg" and reading.is_set():
            raise OSError(errno.EIO, "Input/output error")

    reading = threading.Event()
    files.before = refuse
    found = inspection.verify(ROOT, files, lambda done, total: reading.set())
    assert found.faults == {f"{inspection.UNREADABLE} (Input/output error)": 2}
    assert {damage.kept_as for damage in found.damaged} == {None}
    reading.clear()
    assert inspection.verify(ROOT, files) == inspection.Verification(3, (), True)


def test_a_cache_in_use_is_neither_verified_nor_cleared() -> None:
    files = FaultyFiles()
    store = cache_with(files, 7)
    with pytest.raises(ConflictError, match="in use"):
        inspection.verify(ROOT, files)
    with pytest.raises(ConflictError, match="in use"):
        inspection.clear(ROOT, files)
    store.close()
    assert inspection.clear(ROOT, files) == 7
    assert inspection.statistics(ROOT, files).records == 0


def test_a_directory_that_is_no_cache_is_left_alone() -> None:
    files = FaultyFiles()
    files.make_directory(ROOT)
    for look in (inspection.statistics, inspection.verify, inspection.clear):
        with pytest.raises(NotFoundError, match="no cache directory"):
            look(ROOT, files)
        with pytest.raises(NotFoundError, match="does not exist"):
            look(ROOT / "nowhere", files)
    assert files.names(ROOT) == []


def test_the_parts_of_several_ranks_are_added_up() -> None:
    files = FaultyFiles()
    for rank, count in enumerate((7, 5)):
        store = PageStore(ROOT / f"rank-{rank}-of-2", 1 << 20, b"n" * 16, files=files)
        store.write([page_to_write(number) for number in range(count)])
        store.close()
    path = ROOT / "rank-1-of-2" / "segments" / "00000001.seg"
    files.files[path].data[slot(3) + 900] ^= 1
    found = inspection.statistics(ROOT, files)
    assert (found.records, found.slot_bytes) == (12, {slot_bytes_for(4096): 12})
    assert found.disk_bytes == files.used_bytes(ROOT)
    checked = inspection.verify(ROOT, files)
    assert (checked.records, len(checked.damaged), checked.index_was_right) == (12, 1, True)
    assert str(checked.damaged[0].kept_as).startswith(str(ROOT / "rank-1-of-2" / "quarantine"))
    (kept,) = inspection.statistics(ROOT, files).quarantined
    assert kept.startswith("rank-1-of-2/")
    assert inspection.clear(ROOT, files) == 11
    assert inspection.statistics(ROOT, files).records == 0
