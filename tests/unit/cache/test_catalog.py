"""The catalog against a plain model of what an LRU under a quota does."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kt_runtime.cache.catalog import Catalog, parts
from kt_runtime.cache.index_log import PUT
from kt_runtime.cache.segment import FILE_HEADER_BYTES

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
