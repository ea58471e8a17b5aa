from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from reference.cache.tiers import SHORT_S, PlayedClock, eventually

from kt_runtime.cache.disk import Counters, Health, Use
from kt_runtime.cache.format import slot_bytes_for
from kt_runtime.cache.page import Page
from kt_runtime.cache.read_ahead import Check, ReadAhead

SIZE = 64
BIG = 9 << 20  # a page that is a read of its own
SLOT = slot_bytes_for(SIZE)  # what a page takes while it is read


def page(key: bytes) -> Page:
    return Page(key, [bytearray(SIZE)])


def test_memory_of_a_read_that_hangs_is_nobody_elses(clock: PlayedClock) -> None:
    hangs, seen = threading.Event(), dict[bytes, int]()

    def fetch(pages: Sequence[Page]) -> Check:
        for one in pages:
            seen[one.key] = id(one.pieces[0])
            if one.key == b"slow":
                clock.passes(2 * SHORT_S)
                hangs.wait(60)
            one.pieces[0][:] = one.key[:1] * SIZE
        return lambda: [True] * len(pages)

    health = Health("a disk")
    reader = ReadAhead(
        fetch,
        SIZE,
        memory_bytes=2 * SLOT,
        num_threads=2,
        patience_s=SHORT_S,
        health=health,
        counters=Counters(),
    )
    assert reader.take([page(b"slow")]) == [False]
    assert not health[Use.READING]
    health.regain(Use.READING)
    for number in range(5):
        other = page(b"other-%d" % number)
        assert reader.take([other]) == [True]
        assert other.pieces[0] == b"o" * SIZE
        assert seen[other.key] != seen[b"slow"]
    hangs.set()
    assert reader.close(60.0)
    assert reader.start([b"late"]) <= 1  # nobody reads it any more, and nothing is raised


def test_pages_nobody_came_for_make_room_for_others() -> None:
    def fetch(pages: Sequence[Page]) -> Check:
        return lambda: [True] * len(pages)

    reader = ReadAhead(
        fetch,
        SIZE,
        memory_bytes=4 * SLOT,
        num_threads=1,
        patience_s=60.0,
        health=Health("a disk"),
        counters=Counters(),
    )
    for start in range(0, 40, 4):
        assert reader.take([page(b"taken-%d" % start)]) == [True]
        reader.start([b"%d" % number for number in range(start, start + 4)])
    assert reader.close(60.0)


def test_a_read_that_hangs_and_then_fails_is_left_to_be_tried_out() -> None:
    """Nothing is read while reading is off: if nobody tried, it would stay off for ever."""
    hangs = threading.Event()

    def fetch(pages: Sequence[Page]) -> Check:
        assert hangs.wait(60)
        raise OSError("gone for good")

    health = Health("a disk")
    reader = ReadAhead(
        fetch,
        SIZE,
        memory_bytes=2 * SLOT,
        num_threads=2,
        patience_s=SHORT_S,
        health=health,
        counters=Counters(),
    )
    assert reader.take([page(b"slow")]) == [False]
    assert health.is_late(Use.READING)
    assert not reader.was_refused()
    hangs.set()
    assert reader.close(60.0)
    assert reader.was_refused()
    assert health.reason(Use.READING) == "gone for good"


def test_a_read_that_works_beside_the_last_one_that_failed_does_not_hide_that_reading_is_off() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def fetch(pages: Sequence[Page]) -> Check:
        if pages[0].key != b"slow":
            raise OSError("refused")
        begun.set()
        assert may_end.wait(60)
        return lambda: [True] * len(pages)

    health = Health("a disk")
    reader = ReadAhead(
        fetch,
        SIZE,
        memory_bytes=8 * SLOT,
        num_threads=2,
        patience_s=60.0,
        health=health,
        counters=Counters(),
    )
    assert reader.start([b"slow"]) == 1
    assert begun.wait(60)
    while health[Use.READING]:
        assert reader.take([page(b"other")]) == [False]
    may_end.set()
    assert reader.close(60.0)
    assert not health[Use.READING]
    assert reader.was_refused()


def test_a_slow_disk_keeps_its_caller_no_longer_than_asked_and_what_it_gave_counts(clock: PlayedClock) -> None:
    limit_s = 0.3

    def fetch(pages: Sequence[Page]) -> Check:
        if pages[0].key == b"1":
            eventually(lambda: b"1" not in reader._entries)  # the caller waits for it
            clock.passes(limit_s + 0.1)  # begun within the limit, ends after it
        return lambda: [True] * len(pages)

    reader = ReadAhead(
        fetch,
        5 << 20,  # a read each
        memory_bytes=48 << 20,
        num_threads=1,
        patience_s=1.0,
        health=Health("a disk"),
        counters=Counters(),
    )
    pages = [Page(b"%d" % number, [bytearray(5 << 20)]) for number in range(8)]
    assert reader.take(pages, limit_s) == [True, True] + [False] * 6
    assert reader.close(60.0)


def test_the_disk_goes_on_while_what_came_is_checked() -> None:
    """With one thread that reads: the check of the first job ends only when the next one was read."""
    next_is_read = threading.Event()

    def fetch(pages: Sequence[Page]) -> Check:
        if pages[0].key == b"1":
            next_is_read.set()
        return lambda: [next_is_read.wait(60)] * len(pages)

    reader = ReadAhead(
        fetch,
        9 << 20,  # a read each
        memory_bytes=40 << 20,
        num_threads=1,
        patience_s=60.0,
        health=Health("a disk"),
        counters=Counters(),
    )
    assert reader.take([Page(b"%d" % number, [bytearray(9 << 20)]) for number in range(2)]) == [True, True]
    assert reader.close(60.0)


def test_a_check_that_hangs_keeps_its_memory_and_counts_as_a_disk_that_hangs() -> None:
    may_end = threading.Event()

    def fetch(pages: Sequence[Page]) -> Check:
        return lambda: [may_end.wait(60)] * len(pages)

    health = Health("a disk")
    reader = ReadAhead(
        fetch,
        SIZE,
        memory_bytes=SLOT,
        num_threads=1,
        patience_s=SHORT_S,
        health=health,
        counters=Counters(),
    )
    assert reader.take([page(b"slow")]) == [False]
    assert health.is_late(Use.READING)
    assert reader.start([b"other"]) == 0
    may_end.set()
    assert reader.close(60.0)
    assert health[Use.READING]


def test_a_check_that_raises_is_a_miss() -> None:
    def fetch(pages: Sequence[Page]) -> Check:
        def check() -> list[bool]:
            raise ValueError("a mistake of ours")

        return check

    reader = ReadAhead(
        fetch,
        SIZE,
        memory_bytes=SLOT,
        num_threads=1,
        patience_s=60.0,
        health=Health("a disk"),
        counters=Counters(),
    )
    for _ in range(2):
        assert reader.take([page(b"a")]) == [False]
    assert reader.close(60.0)


def slow_reader(wait: Callable[[], object], patience_s: float, health: Health) -> ReadAhead:
    """Pages of 9 MiB, so that each is a read, which ends when `wait` returns."""

    def fetch(pages: Sequence[Page]) -> Check:
        wait()
        return lambda: [True] * len(pages)

    return ReadAhead(
        fetch,
        BIG,
        memory_bytes=16 * slot_bytes_for(BIG),
        num_threads=1,
        patience_s=patience_s,
        health=health,
        counters=Counters(),
    )


def test_time_in_the_queue_is_not_time_on_the_disk(clock: PlayedClock) -> None:
    """A healthy disk with 12 reads queued before ours, each a sixth of what is allowed. The clock shows their time."""
    begun = itertools.count()

    def read() -> None:
        before = next(begun)
        eventually(lambda: reader._num_finished == before)
        clock.passes(0.15)

    health = Health("a disk")
    reader = slow_reader(read, 0.9, health)
    assert reader.start([b"other-%d" % number for number in range(12)]) == 12
    assert reader.take([Page(b"mine", [bytearray(BIG)])]) == [True]
    assert health[Use.READING]
    assert reader.close(60.0)


def test_a_page_that_is_not_begun_in_time_is_given_up_and_the_disk_is_used_on() -> None:
    health = Health("a disk")
    on = threading.Event()
    reader = slow_reader(lambda: on.wait(60.0), 50.0, health)
    assert reader.start([b"other-%d" % number for number in range(8)]) == 8
    assert reader.take([Page(b"mine", [bytearray(BIG)])], 0.3) == [False]  # while the first read is under way
    on.set()
    assert health[Use.READING]
    assert reader.take([Page(b"other-7", [bytearray(BIG)])]) == [True]
    assert reader.close(60.0)


def test_one_read_that_hangs_does_not_stop_the_other_thread(clock: PlayedClock) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def fetch(pages: Sequence[Page]) -> Check:
        if pages[0].key == b"stuck":
            begun.set()
            assert may_end.wait(60)
        return lambda: [True] * len(pages)

    health = Health("a disk")
    reader = ReadAhead(
        fetch,
        BIG,
        memory_bytes=16 * slot_bytes_for(BIG),
        num_threads=2,
        patience_s=SHORT_S,
        health=health,
        counters=Counters(),
    )
    reader.start([b"stuck"])
    assert begun.wait(60)
    clock.passes(4 * SHORT_S)
    for number in range(20):
        assert reader.take([Page(b"%d" % number, [bytearray(BIG)])]) == [True]
    assert health[Use.READING]
    may_end.set()
    assert reader.close(60.0)
