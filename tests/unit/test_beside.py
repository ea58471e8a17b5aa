"""Work on large adapters beside the engine's batches, in played time, and threads that wait for the end of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kt_runtime import beside
from kt_runtime.adapters import tensors
from kt_runtime.beside import (
    ALONE_SECONDS,
    DOZE_SECONDS,
    GIVEN,
    HURRY_SECONDS,
    LATELY_SECONDS,
    LEAST_GIVEN_SECONDS,
    LEAST_WAITED_SECONDS,
    MOST_GIVEN_SECONDS,
    MOST_WAITED_SECONDS,
    PIECE_BYTES,
    SHARE,
    USUAL_STEPS,
    WAITED,
    Batches,
    piece,
)

PATIENCE_SECONDS = 60.0
PIECE_SECONDS = 0.001
STEP = 0.05
# Relative: sums of a few seconds (8.7e-16 measured), and differences of the played clock (4.4e-13).
ROUNDING, CLOCK_ROUNDING = 8e-15, 4e-12


class Played(Batches):
    """In played time: a piece takes `PIECE_SECONDS` of the thread's time and of the clock's; who waits or sleeps passes
    the clock's. `num_pieces` are left."""

    def __init__(self, num_pieces: int = 1 << 30) -> None:
        self.now, self.ends, self.spent, self.slept, self.num_pieces = 0.0, 0.0, 0.0, 0.0, num_pieces
        super().__init__(lambda: self.now, lambda: self.spent, self._sleeps)
        self.give_way()

    def _sleeps(self, seconds: float) -> None:
        """Of the engine's thread: the other one works."""
        ends, self.slept = self.now + seconds, self.slept + seconds
        while self.now < ends and self.num_pieces:
            self.work()
        self.now = max(self.now, ends)

    def _wait(self, number: int, seconds: float) -> None:
        assert seconds > 0
        self.now += max(seconds, 1e-6)
        if self.now >= self.ends:
            self.now, self._began = self.ends, None

    def work(self) -> None:
        self.pause()
        self._piece()

    def _piece(self) -> None:
        self.now, self.spent, self.num_pieces = (
            self.now + PIECE_SECONDS,
            self.spent + PIECE_SECONDS,
            self.num_pieces - 1,
        )

    def batch(self, seconds: float = STEP, *, is_prompt: bool = False, is_step: bool = False) -> int:
        """The pieces of one thread during a batch, which takes as much longer."""
        count, self.ends = 0, self.now + seconds
        with self.computing(is_prompt=is_prompt, is_step=is_step):
            while self.num_pieces:
                self.pause()
                if self.now >= self.ends:
                    break
                self._piece()
                count, self.ends = count + 1, self.ends + PIECE_SECONDS
            self.now = max(self.now, self.ends)
        return count


@pytest.mark.parametrize("seconds", [0.005, STEP, ALONE_SECONDS])
def test_nothing_computes_beside_a_short_batch(seconds: float) -> None:
    assert Played().batch(seconds) == 0


@pytest.mark.parametrize("seconds", [0.1, 0.4, 2.0])
def test_a_long_batch_takes_longer_by_the_share_and_a_piece(seconds: float) -> None:
    assert 1 <= Played().batch(seconds) <= SHARE * (seconds - ALONE_SECONDS) / (1 - SHARE) / PIECE_SECONDS + 2


def test_without_the_bound_a_thread_would_work_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "SHARE", 1e9)
    monkeypatch.setattr(beside, "ALONE_SECONDS", 0.0)
    played = Played(1000)
    assert played.batch() == 1000


def test_a_thread_that_does_not_give_way_never_waits() -> None:
    played = Played(1000)
    del played._of_thread.number
    assert played.batch() == 1000


def test_a_thread_s_time_before_a_batch_and_in_other_batches_does_not_count() -> None:
    played = Played()
    found = [played.batch(0.4) for _ in range(5)]
    played.spent += 100
    assert len({*found, played.batch(0.4)}) == 1


def test_between_batches_nothing_waits() -> None:
    played = Played()
    played.batch()
    before = played.now, played.num_pieces
    for _ in range(100):
        played.work()
    assert (played.now, played.num_pieces) == pytest.approx((before[0] + 0.1, before[1] - 100), rel=3e-15)


@pytest.mark.parametrize("seconds", [0.008, STEP, 0.4])
def test_the_engine_sleeps_after_a_batch_for_a_part_of_its_time_while_there_is_work(seconds: float) -> None:
    played = Played()
    played.batch(seconds)
    before = played.now, played.num_pieces
    played.give()
    limit = min(MOST_GIVEN_SECONDS, GIVEN * before[0]) + 1e-9
    assert min(MOST_GIVEN_SECONDS, GIVEN * seconds) - 1e-9 <= played.slept <= limit
    assert before[1] - played.num_pieces >= played.slept / PIECE_SECONDS - 1
    assert played.now - before[0] <= limit + PIECE_SECONDS
    played.give()
    assert played.now - before[0] <= limit + PIECE_SECONDS, "it slept twice after one batch"


def test_the_engine_does_not_sleep_where_nothing_had_to_wait() -> None:
    played = Played(0)
    played.batch()
    played.give()
    assert not played.slept


def test_the_engine_sleeps_for_no_longer_than_it_gives_where_the_work_ends_meanwhile() -> None:
    played = Played()
    played.batch()
    played.num_pieces = 3
    played.give()
    assert played.slept == pytest.approx(MOST_GIVEN_SECONDS, rel=ROUNDING)
    played.batch()
    played.give()
    assert played.slept == pytest.approx(MOST_GIVEN_SECONDS, rel=ROUNDING), "nothing waited beside the second batch"


def test_a_piece_that_takes_long_has_all_of_the_time_that_is_given() -> None:
    played = Played()
    played.batch()
    played._piece = lambda: setattr(played, "now", played.now + 1.0)  # type: ignore[method-assign]
    began = played.now
    played.give()
    assert played.now == began + 1.0


def test_a_stream_waits_for_a_prompt_or_for_a_publication_but_not_for_both() -> None:
    played, slept = Played(), []
    for is_prompt in (False, True, False, True, True, True, False):
        before = played.slept
        played.batch(is_prompt=is_prompt)
        played.give()
        slept.append(played.slept > before)
    assert slept == [True, False, True, False, True, False, True]


def test_a_publication_has_most_of_its_time_between_batches_and_none_stops_a_stream_for_long() -> None:
    """A thousand pieces, which are 2 GB: beside steps of 50 ms."""
    played, gaps, in_batches = Played(1000), [], 0
    while played.num_pieces:
        began = played.now
        in_batches += played.batch()
        played.give()
        gaps.append(played.now - began)
    assert max(gaps) <= STEP + MOST_GIVEN_SECONDS + PIECE_SECONDS + 1e-9
    assert in_batches == 0
    assert len(gaps) < 1000 * PIECE_SECONDS / (MOST_GIVEN_SECONDS - PIECE_SECONDS)


def test_after_a_step_that_took_longer_than_usual_only_the_rest_is_given() -> None:
    played = Played()
    found = []
    for seconds in (*[STEP] * 100, STEP + 0.003, STEP + 0.1, STEP):
        before = played.slept
        played.batch(seconds, is_step=True)
        played.give()
        found.append(played.slept - before)
    usual, longer, longest, last = found[99:]
    assert usual == pytest.approx(MOST_GIVEN_SECONDS, rel=CLOCK_ROUNDING)
    assert longer == pytest.approx(MOST_GIVEN_SECONDS - 0.003 * (1 - 1 / USUAL_STEPS), rel=CLOCK_ROUNDING)
    assert longest == pytest.approx(LEAST_GIVEN_SECONDS, rel=CLOCK_ROUNDING) and last == pytest.approx(
        MOST_GIVEN_SECONDS, rel=0.1
    )


def test_steps_that_all_take_longer_than_before_are_usual_soon() -> None:
    """More streams, say: their publications go on."""
    played, found = Played(), []
    for seconds in (*[STEP] * 30, *[1.5 * STEP] * 60):
        before = played.slept
        played.batch(seconds, is_step=True)
        played.give()
        found.append(played.slept - before)
    assert found[30] == pytest.approx(LEAST_GIVEN_SECONDS, rel=CLOCK_ROUNDING) and found[-1] == pytest.approx(
        MOST_GIVEN_SECONDS, rel=0.1
    )


def test_training_and_prompts_say_nothing_about_steps() -> None:
    played = Played()
    for seconds, is_prompt, is_step in [(STEP, False, True), (0.4, True, False), (0.3, False, False)] * 20:
        before = played.slept
        played.batch(seconds, is_prompt=is_prompt, is_step=is_step)
        played.give()
    assert played.slept - before == pytest.approx(MOST_GIVEN_SECONDS, rel=CLOCK_ROUNDING)
    assert played._usual == pytest.approx(STEP, rel=5e-14)


class Hurried(Batches):
    """In played time, with a thread that ends its work after `left` seconds of the engine's sleep, or never."""

    def __init__(self, left: float) -> None:
        self.now, self.left, self.slept = 100.0, left, 0.0
        super().__init__(lambda: self.now, sleep=self._sleeps)

    def _sleeps(self, seconds: float) -> None:
        self.now, self.slept = self.now + seconds, self.slept + seconds
        if self.slept >= self.left:
            self.ended()

    def step(self, seconds: float = STEP) -> float:
        """How long the engine slept after a batch."""
        before = self.slept
        with self.computing():
            self.now += seconds
        self.give()
        return self.slept - before


@pytest.mark.parametrize("left", [0.0, 0.003, 0.009])
def test_the_engine_waits_for_a_small_adapter_that_is_nearly_ready(left: float) -> None:
    hurried = Hurried(left)
    hurried.hurry()
    assert left <= hurried.step() <= left + DOZE_SECONDS + 1e-9
    assert hurried.step() == 0


@pytest.mark.parametrize("seconds", [0.008, STEP, 0.2])
def test_it_waits_no_longer_than_a_part_of_the_batch_and_once_after_each(seconds: float) -> None:
    hurried = Hurried(1e9)
    hurried.hurry()
    expected = min(MOST_WAITED_SECONDS, WAITED * seconds + LEAST_WAITED_SECONDS)
    assert hurried.step(seconds) == pytest.approx(expected, rel=4e-11)  # 4.6e-12: a small difference of large times
    before = hurried.slept
    hurried.give()
    assert hurried.slept == before


def test_a_thread_that_a_file_system_keeps_waiting_is_not_waited_for() -> None:
    hurried = Hurried(1e9)
    hurried.hurry()
    hurried.now += HURRY_SECONDS
    assert hurried.step() == 0


def test_threads_of_a_thread_that_gives_way_do_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches()
    monkeypatch.setattr(tensors, "BATCHES", batches)
    seen: list[bool] = []

    def work(begins: Callable[[], None]) -> None:
        begins()
        seen.extend(tensors.on_threads(lambda _: batches.gives_way(), range(3)))

    for begins in (batches.hurry, batches.give_way):
        thread = threading.Thread(target=work, args=(begins,))
        thread.start()
        thread.join(PATIENCE_SECONDS)
    assert seen == [False] * 3 + [True] * 3


def test_a_batch_that_fails_has_ended() -> None:
    batches = Batches(used=iter(range(100)).__next__)
    batches.give_way()
    with pytest.raises(KeyError), batches.computing():
        raise KeyError
    for _ in range(10):
        batches.pause()


class Seen(Batches):
    """`waits` is set when a thread waits. Each thread has used an hour when it calls `pause` for the second time."""

    def __init__(self) -> None:
        seconds = iter((0.0, *([3600.0] * 100)))
        super().__init__(used=seconds.__next__)
        self.waits = threading.Event()

    def _wait(self, number: int, seconds: float) -> None:
        self.waits.set()
        super()._wait(number, seconds)

    def paused_thread(self, then: Callable[[], None]) -> threading.Thread:
        """It waits in the batch that is computed."""

        def work() -> None:
            self.give_way()
            self.pause()
            self.pause()
            then()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert self.waits.wait(PATIENCE_SECONDS)
        return thread


def test_a_thread_that_has_had_its_share_goes_on_when_the_batch_ends() -> None:
    order: list[str] = []
    batches = Seen()
    with batches.computing():
        thread = batches.paused_thread(lambda: order.append("thread"))
        order.append("batch")
    thread.join(PATIENCE_SECONDS)
    assert order == ["batch", "thread"] and not thread.is_alive()


def test_a_thread_that_slept_through_the_end_of_its_batch_goes_on_in_the_next_one() -> None:
    gone_on = threading.Event()
    batches = Seen()
    with batches.computing():
        thread = batches.paused_thread(gone_on.set)
    with batches.computing():
        assert gone_on.wait(PATIENCE_SECONDS)
    thread.join(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("items", "num_bytes", "expected"),
    [(64, 64 * PIECE_BYTES, 1), (64, 16 * PIECE_BYTES, 4), (3, 30 * PIECE_BYTES, 1), (1, 0, PIECE_BYTES)],
)
def test_pieces_have_about_as_many_bytes(items: int, num_bytes: int, expected: int) -> None:
    assert piece(items, num_bytes) == expected


def test_requests_are_served_during_a_batch_and_shortly_after_it() -> None:
    batches = Played()
    assert not batches.are_computed()
    with batches.computing():
        batches.now += 10 * LATELY_SECONDS
        assert batches.are_computed()
    batches.now += 0.9 * LATELY_SECONDS
    assert batches.are_computed()
    batches.now += 0.2 * LATELY_SECONDS
    assert not batches.are_computed()


def test_there_is_work_beside_while_threads_that_give_way_begin_pieces_and_shortly_after() -> None:
    batches = Played()
    assert not batches.has_work_beside()
    batches.work()
    assert batches.has_work_beside()
    batches.now += LATELY_SECONDS
    assert not batches.has_work_beside()
    batches.hurry()
    assert batches.has_work_beside()
    batches.ended()
    assert not batches.has_work_beside()


def test_a_thread_that_does_not_give_way_is_no_work_beside() -> None:
    batches = Batches()
    batches.pause()
    assert not batches.has_work_beside()
