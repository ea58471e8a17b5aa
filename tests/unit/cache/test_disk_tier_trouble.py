"""The tier in front of a disk that is full, read-only, gone or hanging: it answers, says so once, and comes back."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from reference.cache.files import (
    Fail,
    FaultyFiles,
    Hang,
    contents,
    key_of,
    page_to_write,
    payload_of,
)
from reference.cache.tiers import (
    ROOT,
    SHORT_S,
    SIZE,
    PlayedClock,
    eventually,
    keys,
    present,
    settings,
    stopped_lines,
    write,
)
from reference.cases import examples

from kt_runtime.cache.disk import Counters, Health, Use
from kt_runtime.cache.disk_tier import DiskTier, DiskTierSettings
from kt_runtime.cache.page import Page
from kt_runtime.cache.write_behind import WriteBehind


def tried_out(fault: Fail) -> None:
    """Returns when the tier has tried twice more whether its disk works."""
    before = fault.raised
    eventually(lambda: fault.raised >= before + 2)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_or_read_only_disk_is_read_and_written_again_when_it_can_be(
    number: int, files: FaultyFiles, open_tier: Callable[..., DiskTier], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tier = open_tier()
    write(tier, range(10))
    assert tier.flush(60.0)
    fault = Fail(number, "write", "sync")
    files.before = fault
    for start in range(10, 60, 10):
        write(tier, range(start, start + 10))
        tier.flush()
    tried_out(fault)
    assert present(tier, range(10)) == 10
    assert tier.look_up(keys(range(20))) == 10
    assert tier.status()["dropped"] == 50
    assert len(stopped_lines(caplog)) == 1
    assert "writing to /cache stopped" in stopped_lines(caplog)[0]
    fault.is_on = False
    eventually(lambda: tier.health[Use.WRITING])
    assert write(tier, range(10, 20)) == [True] * 10
    assert tier.flush(60.0)
    assert present(tier, range(20)) == 20
    assert sum("works again" in record.message for record in caplog.records) == 1


def test_a_full_disk_can_be_cleared(files: FaultyFiles, open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier()
    write(tier, range(10))
    assert tier.flush(60.0)
    fault = Fail(errno.ENOSPC, "write", "sync")
    files.before = fault
    write(tier, range(10, 20))
    eventually(lambda: not tier.health[Use.WRITING])
    fault.is_on = False  # removing a segment makes room; nobody has tried to write yet
    assert tier.clear()
    assert tier.status()["cleared"] == 10
    eventually(lambda: tier.health[Use.WRITING])


def test_a_directory_in_the_place_of_another_is_not_cleared(
    files: FaultyFiles, open_tier: Callable[..., DiskTier]
) -> None:
    tier = open_tier(interval_s=30.0)  # nobody looks after the directory meanwhile
    write(tier, range(10))
    assert tier.flush(60.0)
    files.remove_tree(ROOT)
    files.make_directory(ROOT / "segments")
    name = ROOT / "segments" / "00000001.seg"
    other = files.open(name, write=True, create=True)
    other.write_from([b"somebody else's"], 0)
    other.close()
    assert not tier.clear(timeout_s=0.5)
    assert name in files.files
    assert not tier.health[Use.READING]


def test_a_directory_that_is_removed_is_used_again_when_it_is_back(
    files: FaultyFiles, open_tier: Callable[..., DiskTier], caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    write(tier, range(10))
    assert tier.flush(60.0)
    files.remove_tree(ROOT)
    eventually(lambda: not tier.health[Use.READING])
    assert write(tier, range(10, 20)) == [False] * 10
    assert tier.look_up(keys(range(10))) == 0
    assert present(tier, range(10)) == 0
    time.sleep(0.1)
    assert ROOT not in files.directories  # nothing is made anew in the place of a disk that was taken away
    assert len(stopped_lines(caplog)) == 1
    files.make_directory(ROOT)
    eventually(lambda: tier.health[Use.READING])
    assert write(tier, range(5)) == [True] * 5
    assert tier.flush(60.0)
    assert present(tier, range(10)) == 5


def test_a_rank_s_part_is_made_anew_where_its_directory_is_there(
    files: FaultyFiles, open_tier: Callable[..., DiskTier]
) -> None:
    part = ROOT / "rank-1-of-2"
    tier = open_tier(directory=part, root=ROOT)
    write(tier, range(10))
    assert tier.flush(60.0)
    files.remove_tree(ROOT)
    eventually(lambda: not tier.health[Use.READING])
    time.sleep(0.1)
    assert ROOT not in files.directories
    files.make_directory(ROOT)
    eventually(lambda: tier.health[Use.READING])
    assert part in files.directories
    assert write(tier, range(5)) == [True] * 5


def test_reads_that_are_refused_stop_it_until_they_work(
    files: FaultyFiles, open_tier: Callable[..., DiskTier], caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    write(tier, range(10))
    assert tier.flush(60.0)
    fault = Fail(errno.EIO, "read")
    files.before = fault
    for _ in range(5):
        assert present(tier, range(10)) == 0
    tried_out(fault)
    assert len(stopped_lines(caplog)) == 1
    assert tier.look_up(keys(range(10))) == 0
    fault.is_on = False
    eventually(lambda: tier.health[Use.READING])
    assert tier.look_up(keys(range(10))) == 10
    assert present(tier, range(10)) == 10


def test_a_disk_that_hangs_on_reads_holds_nobody_up(
    files: FaultyFiles, open_tier: Callable[..., DiskTier], clock: PlayedClock, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(patience_s=SHORT_S)
    write(tier, range(10))
    assert tier.flush(60.0)
    hang = Hang("read")
    files.before = hang
    assert tier.look_up(keys(range(10))) == 10
    eventually(lambda: hang.begun)
    clock.passes(2 * SHORT_S)
    assert present(tier, range(10)) == 0
    assert not hang.ended
    begun = hang.begun
    for _ in range(20):
        assert tier.look_up(keys(range(10))) == 0
        assert present(tier, range(10)) == 0
    assert hang.begun <= begun + 1  # the tier's own try whether the disk works again; none for a request
    assert len(stopped_lines(caplog)) == 1
    hang.release()
    eventually(lambda: tier.health[Use.READING])
    assert present(tier, range(10)) == 10
    assert tier.status()["late"] == 1


def test_a_disk_that_hangs_on_writes_holds_nobody_up(
    files: FaultyFiles, open_tier: Callable[..., DiskTier], clock: PlayedClock, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(write_memory_bytes=10 * SIZE, patience_s=SHORT_S)
    write(tier, range(5))
    assert tier.flush(60.0)
    hang = Hang("write", "sync")
    files.before = hang
    for start in range(10, 300, 10):
        write(tier, range(start, start + 10))
        clock.passes(0.6 * SHORT_S)
    assert not hang.ended
    assert present(tier, range(5)) == 5
    eventually(lambda: not any(write(tier, range(400, 401))) and stopped_lines(caplog))
    assert len(stopped_lines(caplog)) == 1
    hang.release()
    eventually(lambda: tier.health[Use.WRITING])
    assert write(tier, range(300, 305)) == [True] * 5
    assert tier.flush(60.0)
    assert present(tier, range(300, 305)) == 5


def test_a_slow_disk_with_much_to_write_is_not_one_that_hangs(
    files: FaultyFiles, open_tier: Callable[..., DiskTier], clock: PlayedClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits to be written takes longer than the patience; each call on the disk takes a fraction of it."""
    tier = open_tier(write_memory_bytes=4 * SIZE, patience_s=1.0)
    begun: list[str] = []

    def slow(operation: str, path: Path) -> None:
        if operation == "write":
            begun.append(operation)
            clock.passes(0.15)

    files.before = slow
    for start in range(0, 320, 4):
        write(tier, range(start, start + 4))
    assert tier.flush(60.0)
    assert 0.15 * len(begun) > 10
    assert stopped_lines(caplog) == []
    assert tier.health[Use.WRITING]


def test_closing_a_slow_disk_writes_what_it_can_and_ends(
    files: FaultyFiles, open_tier: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for writing is over while the tenth page is written; then a minute is left to end the thread."""
    tier = open_tier()
    written, is_slow, drop_all = itertools.count(1), threading.Event(), WriteBehind.drop_all

    def slow(operation: str, path: Path) -> None:
        if operation == "write" and path.suffix == ".seg" and next(written) == 10:
            is_slow.set()
            assert may_go_on.wait(60)

    def drop(writer: WriteBehind) -> None:
        drop_all(writer)
        may_go_on.set()

    may_go_on = threading.Event()
    files.before = slow
    monkeypatch.setattr(WriteBehind, "flush", lambda writer, timeout_s: not is_slow.wait(60))
    monkeypatch.setattr(WriteBehind, "drop_all", drop)
    for number in range(60):
        write(tier, range(number, number + 1))
    tier.close(60.0)
    assert not files.locks  # the writing thread has ended, so that another server may have the directory
    files.before = lambda operation, path: None
    assert 0 < present(open_tier(), range(60)) < 60


def test_a_write_that_hangs_is_said_though_there_is_memory(
    files: FaultyFiles, open_tier: Callable[..., DiskTier], clock: PlayedClock, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(patience_s=0.02)
    hang = Hang("write")
    files.before = hang
    assert write(tier, range(5)) == [True] * 5
    eventually(lambda: hang.begun)
    clock.passes(0.11)
    assert write(tier, range(5, 10)) == [False] * 5
    assert len(stopped_lines(caplog)) == 1
    assert "a write takes longer than 0.1 s" in stopped_lines(caplog)[0]
    hang.release()
    eventually(lambda: tier.health[Use.WRITING])
    assert write(tier, range(5, 10)) == [True] * 5
    assert tier.flush(60.0)
    assert present(tier, range(10)) == 10  # what waited was written


def test_what_is_tried_out_on_a_failing_disk_keeps_the_quota(
    files: FaultyFiles, open_tier: Callable[..., DiskTier]
) -> None:
    tier = open_tier()
    write(tier, range(400))
    assert tier.flush(60.0)
    fault, sizes = Fail(errno.ENOSPC, "write"), []

    def watch(operation: str, path: Path) -> None:
        sizes.append(files.used_bytes(ROOT))
        fault(operation, path)

    files.before = watch
    write(tier, range(400, 500))
    eventually(lambda: not tier.health[Use.WRITING])
    fault.is_on = False
    eventually(lambda: tier.health[Use.WRITING])
    assert max(sizes) <= (1 << 20) * 1.01


def test_a_mistake_of_our_own_while_looking_after_the_directory_does_not_end_it(
    files: FaultyFiles, open_tier: Callable[..., DiskTier]
) -> None:
    tier = open_tier()

    def fail(operation: str, path: Path) -> None:
        if operation == "identity":
            raise RuntimeError("a mistake")

    files.before = fail
    eventually(lambda: not tier.health[Use.WRITING])
    files.before = lambda operation, path: None
    eventually(lambda: tier.health[Use.WRITING])
    assert write(tier, range(5)) == [True] * 5
    assert tier.flush(60.0)
    assert present(tier, range(5)) == 5


class Interrupted(list[Page]):
    """Pages; before `action` gives the second one, something else happens."""

    def __init__(self, pages: list[Page], action: Callable[[], object]) -> None:
        super().__init__(pages)
        self.action = action

    def __iter__(self) -> Iterator[Page]:
        for number, page in enumerate(super().__iter__()):
            if number == 1:
                self.action()
            yield page


def test_two_callers_may_offer_the_same_page_at_the_same_time(files: FaultyFiles) -> None:
    written: list[tuple[bytes, bytes]] = []
    is_offered = threading.Event()

    def write(pages: Sequence[Page], chain: Sequence[bytes]) -> None:
        assert is_offered.wait(60)
        written.extend((page.key, contents(page)) for page in pages)

    writer = WriteBehind(
        write,
        lambda: None,
        memory_bytes=1 << 20,
        interval_s=1.0,
        patience_s=60.0,
        health=Health("here"),
        counters=Counters(),
    )
    other = [page_to_write(1), page_to_write(2)]
    assert writer.offer(Interrupted([page_to_write(1), page_to_write(3)], lambda: writer.offer(other, ())), ()) == 2
    is_offered.set()
    assert writer.flush(60.0)
    assert sorted(written) == [(key_of(number), payload_of(number)) for number in (1, 2, 3)]
    assert writer.close(60.0)


def test_a_machine_without_memory_for_a_page_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []

    def no_memory(size: int, _: int) -> None:
        refused.append(size)
        raise MemoryError

    monkeypatch.setattr("kt_runtime.cache.page._slab", no_memory)
    writer = WriteBehind(
        lambda pages, chain: None,
        lambda: None,
        memory_bytes=1 << 20,
        interval_s=1.0,
        patience_s=60.0,
        health=Health("here"),
        counters=Counters(),
    )
    assert writer.offer([page_to_write(1)], ()) == 0
    assert len(refused) == 2  # at once, and where it would have waited for a buffer
    assert writer.close(60.0)


def test_memory_for_writing_is_bounded(
    files: FaultyFiles, open_tier: Callable[..., DiskTier], clock: PlayedClock
) -> None:
    tier = open_tier(write_memory_bytes=8 * SIZE, patience_s=SHORT_S)
    hang = Hang("write")
    files.before = hang
    accepted = write(tier, range(20))
    assert accepted == [True] * 8 + [False] * 12  # the beginning is worth more than the end
    hang.release()
    assert tier.flush(60.0)
    assert present(tier, range(20)) == 8


def test_a_disk_that_is_not_there_at_the_start_is_waited_for(
    files: FaultyFiles, open_tier: Callable[..., DiskTier]
) -> None:
    fault = Fail(errno.EROFS, "make_directory")
    files.before = fault
    tier = open_tier()
    assert write(tier, range(5)) == [False] * 5
    assert tier.look_up(keys(range(5))) == 0
    fault.is_on = False
    eventually(lambda: tier.health[Use.WRITING])
    assert write(tier, range(5)) == [True] * 5


def test_a_disk_that_is_full_at_the_start_is_read(
    files: FaultyFiles, open_tier: Callable[..., DiskTier], caplog: pytest.LogCaptureFixture
) -> None:
    first = open_tier()
    write(first, range(10))
    assert first.flush(60.0)
    first.close()
    fault = Fail(errno.ENOSPC, "write", "sync")
    files.before = fault
    tier = open_tier()
    assert present(tier, range(10)) == 10
    write(tier, range(10, 20))
    eventually(lambda: not tier.health[Use.WRITING])
    assert present(tier, range(10)) == 10
    assert len(stopped_lines(caplog)) == 1
    fault.is_on = False
    eventually(lambda: tier.health[Use.WRITING])


def test_closing_does_not_wait_for_a_disk_that_hangs(files: FaultyFiles, open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier()
    hang = Hang("write", "sync", "read")
    files.before = hang
    write(tier, range(5))
    tier.close(0.2)
    assert not hang.ended
    hang.release()
    eventually(lambda: not files.locks)


@pytest.mark.slow
def test_a_disk_that_fails_again_and_again_is_tried_less_and_less(
    files: FaultyFiles, open_tier: Callable[..., DiskTier], caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()

    def fail_in_segments(operation: str, path: Path) -> None:
        if operation == "write" and path.suffix == ".seg":
            raise OSError(errno.ENOSPC, "No space left on device")

    files.before = fail_in_segments  # what is tried out works, what counts does not
    began = time.monotonic()
    while time.monotonic() - began < 0.6:
        write(tier, range(5))
        tier.flush()
        time.sleep(0.005)
    assert len(stopped_lines(caplog)) <= 8


OPERATIONS = ["write", "read", "look_up", "flush", "fail", "hang", "remove", "heal", "reopen", "cut"]


@settings_of_hypothesis(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9)), max_size=40))
def test_whatever_happens_nothing_is_raised_and_no_page_is_wrong(operations: list[tuple[str, int]]) -> None:
    files = FaultyFiles()
    quick = settings(patience_s=0.02, interval_s=0.005, sync_interval_s=0.01, read_memory_bytes=20 * SIZE)
    tier = DiskTier(quick, files)
    hang = Hang("read", "write")
    with own_mistakes() as mistakes:
        tier = run(operations, tier, quick, files, hang)
        hang.release()
        files.before = lambda name, path: None
        tier.close(1.0)
        eventually(lambda: not any(thread.name.startswith("cache-") for thread in threading.enumerate()))
    assert mistakes == []


@contextlib.contextmanager
def own_mistakes() -> Iterator[list[str]]:
    """What is logged with a traceback meanwhile: mistakes in the threads of the cache."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(logging.Formatter().format(record)) if record.exc_info else None  # type: ignore[method-assign]
    logging.getLogger("kt_runtime.cache").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("kt_runtime.cache").removeHandler(handler)


def run(
    operations: list[tuple[str, int]], tier: DiskTier, quick: DiskTierSettings, files: FaultyFiles, hang: Hang
) -> DiskTier:
    for operation, number in operations:
        numbers = range(number * 8, number * 8 + 16)
        if operation == "write":
            assert len(write(tier, numbers)) == 16
        elif operation == "read":
            present(tier, numbers)
        elif operation == "look_up":
            assert 0 <= tier.look_up(keys(numbers)) <= 16
        elif operation == "flush":
            tier.flush(0.02)
        elif operation == "fail":
            names = [["write"], ["read"], ["sync"], ["open"], ["identity"]][number % 5]
            files.before = Fail([errno.ENOSPC, errno.EIO][number % 2], *names)
        elif operation == "hang":
            hang.released.clear()
            files.before = hang
        elif operation == "remove":
            files.remove_tree(ROOT)
        elif operation == "cut":
            for file in list(files.files.values()):
                del file.data[len(file.data) * number // 10 :]
        else:
            hang.release()
            files.before = lambda name, path: None
            files.make_directory(ROOT)
            if operation == "reopen":
                tier.close(1.0)
                eventually(lambda: not files.locks)
                tier = DiskTier(quick, files)
    return tier
