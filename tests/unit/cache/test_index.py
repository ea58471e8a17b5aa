"""The index: the catalog against a plain model of an LRU under a quota, the log against torn and lost writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.cache.files import FaultyFiles

from kt_runtime.cache.format import FILE_HEADER_BYTES
from kt_runtime.cache.index import DROP, PUT, USE, Catalog, Change, IndexLog, parts

QUOTA = 40 << 10
SLOT = 4096


def check_consistent(catalog: Catalog) -> None:
    owned: dict[Any, Any] = {}
    for number, segment in catalog.segments.items():
        live = [owner for owner in segment.owners if owner is not None]
        assert segment.live == len(live)
        owned |= {owner: (number, slot) for slot, owner in enumerate(segment.owners) if owner}
    assert owned == {record: parts(place) for record, place in catalog.oldest_first()}
    assert catalog.used_bytes == sum(segment.file_bytes for segment in catalog.segments.values())
    assert catalog.used_bytes <= catalog.room_bytes


def put(catalog: Catalog, record: bytes, slot_bytes: int = SLOT) -> bool:
    place = catalog.allocate(slot_bytes)
    if place is None:
        return False
    catalog.put(record, place)
    return True


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["put", "touch", "drop"]), st.integers(0, 14)), max_size=120))
def test_what_goes_is_what_was_used_least_recently(operations: list[tuple[str, int]]) -> None:
    catalog, model = Catalog(QUOTA), list[bytes]()
    for operation, number in operations:
        record = bytes([number]) * 16
        if operation == "put":
            assert put(catalog, record)
            if record in model:
                model.remove(record)
            model.append(record)
            for evicted in catalog.evicted:
                if evicted in model and evicted not in catalog:
                    assert evicted == model.pop(0)
            catalog.evicted.clear()
        elif operation == "touch":
            assert catalog.touch(record) == (record in model)
            if record in model:
                model.remove(record)
                model.append(record)
        else:
            assert catalog.drop(record) == (record in model)
            if record in model:
                model.remove(record)
        assert [found for found, _ in catalog.oldest_first()] == model
        check_consistent(catalog)


def test_a_full_quota_holds_as_many_as_fit() -> None:
    catalog = Catalog(QUOTA)
    for number in range(100):
        assert put(catalog, number.to_bytes(16, "big"))
    assert len(catalog) == (QUOTA - FILE_HEADER_BYTES) // SLOT
    assert [int.from_bytes(record, "big") for record, _ in catalog.oldest_first()] == list(range(91, 100))


def test_a_slot_that_is_read_is_not_given_away() -> None:
    catalog = Catalog(QUOTA)
    assert put(catalog, b"r" * 16)
    place = catalog.find(b"r" * 16)
    assert place is not None
    catalog.pin(place)
    for number in range(50):
        assert put(catalog, number.to_bytes(16, "big"))
    assert catalog.find(b"r" * 16) == place
    catalog.drop(b"r" * 16)
    used = {catalog.allocate(SLOT) for _ in range(5)}
    assert place not in used
    catalog.unpin(place)
    check_consistent_free = catalog.allocate(SLOT)
    assert check_consistent_free == place


def test_records_of_another_size_get_room_by_whole_segments() -> None:
    quota = 8 << 20
    catalog = Catalog(quota)
    number = 0
    while not catalog.evicted:
        assert put(catalog, number.to_bytes(16, "big"))
        number += 1
    catalog.evicted.clear()
    before = len(catalog)
    assert put(catalog, b"large" + bytes(11), 64 << 10)
    assert catalog.removed == [1]
    assert len(catalog) >= before * 6 // 8
    check_consistent(catalog)
    for large in range(400):
        assert put(catalog, b"L" + large.to_bytes(15, "big"), 64 << 10)
        check_consistent(catalog)
    assert all(segment.geometry.slot_bytes == 64 << 10 for segment in catalog.segments.values())
    assert catalog.used_bytes >= quota * 0.98


def test_a_record_larger_than_the_quota_is_refused() -> None:
    catalog = Catalog(QUOTA)
    assert put(catalog, b"r" * 16)
    assert catalog.allocate(QUOTA) is None
    assert b"r" * 16 in catalog


def test_loading_two_owners_of_one_slot_keeps_the_later() -> None:
    first = Catalog(QUOTA)
    assert put(first, b"a" * 16)
    second = Catalog(QUOTA)
    second.add_segment(first.segments[1].geometry, 2)
    second.load_changes(
        [
            (PUT, 1, 0, b"a" * 16),
            (PUT, 1, 0, b"b" * 16),
            (PUT, 1, 1, b"b" * 16),
            (PUT, 1, 2, b"c" * 16),  # there is no such slot
            (PUT, 9, 0, b"c" * 16),
        ]
    )
    second.finish_loading()
    assert [record for record, _ in second.oldest_first()] == [b"b" * 16]
    check_consistent(second)
    assert parts(second.allocate(SLOT) or 0) == (1, 0)


PATH = Path("/cache/index.log")
CHANGES = [Change(PUT, 1, slot, bytes([slot]) * 16) for slot in range(20)] + [
    Change(USE, 0, 0, b"\x03" * 16),
    Change(DROP, 0, 0, b"\x04" * 16),
]


def files_with_log(*blocks: list[Change]) -> FaultyFiles:
    files = FaultyFiles()
    files.make_directory(PATH.parent)
    log = IndexLog(files, PATH, write=True)
    assert list(log.replay()) == []
    for block in blocks:
        log.append(block)
    log.close()
    return files


def replayed(files: FaultyFiles, *, write: bool = True) -> tuple[list[Change], IndexLog]:
    log = IndexLog(files, PATH, write=write)
    return [Change(*change) for change in log.replay()], log


def test_changes_come_back_in_order() -> None:
    files = files_with_log(CHANGES[:7], CHANGES[7:])
    changes, log = replayed(files)
    assert changes == CHANGES
    assert not log.is_damaged
    assert log.num_changes == len(CHANGES)
    log.append([Change(USE, 0, 0, b"\x01" * 16)])
    assert replayed(files)[0][-1][0] == USE


@given(st.integers(0, 1000))
def test_an_end_cut_off_costs_the_last_block_only(missing: int) -> None:
    files = files_with_log(CHANGES[:7], CHANGES[7:])
    data = files.files[PATH].data
    del data[len(data) - missing % len(data) :]
    size = len(data)
    changes, log = replayed(files)
    assert changes in ([], CHANGES[:7], CHANGES)
    assert not log.is_damaged
    log.append(CHANGES[:1])  # goes where the whole blocks end
    assert replayed(files)[0] == [*changes, CHANGES[0]]
    assert size or not changes


def test_damage_before_the_end_is_noticed() -> None:
    files = files_with_log(CHANGES[:7], CHANGES[7:])
    files.files[PATH].data[30] ^= 1
    _, log = replayed(files, write=False)
    assert log.is_damaged


def test_a_log_of_another_format_is_not_used() -> None:
    files = files_with_log(CHANGES)
    files.files[PATH].data[4] += 1
    assert replayed(files)[0] == []


def test_rewriting_leaves_no_history() -> None:
    files = files_with_log(CHANGES, CHANGES, CHANGES)
    _, log = replayed(files)
    before = log.size_bytes
    log.rewrite(CHANGES[:3])
    assert log.size_bytes < before
    log.append(CHANGES[3:5])
    assert replayed(files)[0] == CHANGES[:5]
    files.power_cut()
    assert replayed(files)[0] == CHANGES[:3]  # what was appended was not synced


def test_rewriting_that_fails_leaves_the_old_log() -> None:
    files = files_with_log(CHANGES)
    _, log = replayed(files)

    def fail(operation: str, path: Path) -> None:
        if operation == "rename":
            raise OSError(28, "No space left on device")

    files.before = fail
    with pytest.raises(OSError, match="No space"):
        log.rewrite(CHANGES[:1])
    files.before = lambda operation, path: None
    log.append(CHANGES[:1])
    assert replayed(files)[0] == [*CHANGES, CHANGES[0]]
