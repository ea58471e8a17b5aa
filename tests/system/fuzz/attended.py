"""A room whose streams and training run continue all the time, and the question whether they have noticed anything."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from system.fuzz.room import Gap, Room, Stream, TrainingRun, Watch, room

LONGEST_GAP_SECONDS = 2.0
QUIET_SECONDS = 5.0
# Between two answers of a stream and two rounds of training, unless strict: the server has this time for the inputs.
STREAM_REST_SECONDS, TRAINING_REST_SECONDS = 0.25, 2.0


@dataclass
class Attended:
    """`quiet_gap_s`: the longest wait between two tokens before the attack, streams and training in progress.

    `strict`: no wait above `LONGEST_GAP_SECONDS` by the clock. Else the server's processor time between two tokens is
    judged, at most `LONGEST_GAP_SECONDS` of each processor: other programs do not count.
    """

    room: Room
    streams: list[Stream]
    run: TrainingRun
    watch: Watch
    quiet_gap_s: float
    strict: bool

    @property
    def longest_gap_s(self) -> float:
        return LONGEST_GAP_SECONDS * (1 if self.strict else os.cpu_count() or 1)

    @property
    def unit(self) -> str:
        return "s" if self.strict else "s of processor time"

    def gaps(self, since: float) -> list[Gap]:
        """Longer than allowed, ended after `since`; a stream that waits now counts with what it has waited."""
        found = [gap for stream in self.streams for gap in [*stream.gaps, stream.waiting()] if gap.until > since]
        return [gap for gap in found if gap.seconds > self.longest_gap_s]

    def troubles(self, since: float) -> list[str]:
        """What has gone wrong since then, in words; empty: nobody has noticed anything."""
        if self.watch.ended:
            return [f"ended: {self.watch.ended[0]}"]
        troubles = [f"a stream waited for a token: {gap.seconds:.1f} {self.unit}" for gap in self.gaps(since)]
        troubles += [f"stream: {fault}" for stream in self.streams for fault in stream.faults]
        return troubles + [f"training run: {fault}" for fault in self.run.faults]


@contextlib.contextmanager
def attended(place: Path, strict: bool) -> Iterator[Attended]:
    stream_s, training_s = (0.0, 0.0) if strict else (STREAM_REST_SECONDS, TRAINING_REST_SECONDS)
    with (
        room(place) as made,
        made.streaming(stream_s, time.monotonic if strict else made.processor_seconds) as streams,
        made.training(training_s) as run,
    ):
        watch = made.watch()
        begun = time.monotonic()
        while time.monotonic() < begun + QUIET_SECONDS or not run.num_rounds or not all(s.num_answers for s in streams):
            watch.any_ended.wait(0.1)
            assert not watch.ended and not run.faults and not any(stream.faults for stream in streams), run.faults
        quiet = max(gap.seconds for stream in streams for gap in stream.gaps)
        try:
            yield Attended(made, streams, run, watch, quiet, strict)
        finally:
            watch.finish()


def under_way(facts: list[dict[str, Any]], since: float, until: float) -> list[str]:
    """Names of the inputs that were in progress at some time between two moments, by what `journal` has read."""
    begun = {fact["case"]: fact["at"] for fact in facts if "at" in fact}
    ended = {fact["case"]: fact["end"] for fact in facts if "end" in fact}
    return [case for case, at in begun.items() if at <= until and ended.get(case, until) >= since]


def journal(directory: Path) -> list[dict[str, Any]]:
    """What the attackers have written down in `directory`. A line that was cut off by a death is left out."""
    facts = []
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                facts.append(json.loads(line))
    return facts
