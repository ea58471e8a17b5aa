"""The arithmetic of `bench swap`.

A stream's tokens come one decode step apart, more or less. A *stall* is by how much the longest gap between two tokens
of any stream, while an adapter is published, exceeds the decode step: the median gap of the same streams right before
and right after, since a step takes longer the longer the streams are. A shared machine stops now and then by itself:
so there is the median of the rounds' longest gaps, too, and a control, whose streams have gaps while requests come and
nothing is published. The longer one looks, the longer is the longest gap. So each round of a load is followed by a
control of the same length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

FIRST_CYCLES = 100
"""Memory grows in the first cycles, while caches fill; only its growth afterwards counts."""
ALLOWED_MS = 10.0
CONTROL = "control"
"""The row in which nothing is published."""
PHASES = ("publishing", "first_token", "unloading", "storing")
"""The phases of a load's round, in order. They last until the name has moved and each stream has got a token; until the
request to unload is sent, half a second after the adapter's first token; until half a second after the adapter is
unloaded; until its version is on disk, which it already is in all rounds but the first. A large adapter's first token
takes a prompt and a step that are longer than the base's."""

HEADINGS = {
    "publish_ms": "published",
    "first_token_ms": "first token",
    "unload_ms": "unloaded",
    "decode_step_ms": "decode step",
    "stall_ms": "longest stall",
    "median_stall_ms": "longest stall, median of rounds",
    "quiet_stall_ms": "longest stall before and after",
    "running_stall_ms": "longest stall without the machine's stops",
    "running_median_stall_ms": "the same, median of rounds",
    "control_running_stall_ms": "longest stall without stops in the control",
    "control_stall_ms": "longest stall in the control",
    "control_median_stall_ms": "control's, median of rounds",
    **{f"{phase}_stall_ms": f"longest stall, {phase.replace('_', ' ')}" for phase in PHASES},
    "stolen_ms": "stolen by the machine's host",
    "control_stolen_ms": "stolen in the control",
    "stopped_ms": "longest stop of the machine",
    "control_stopped_ms": "longest stop in the control",
}
"""Times of a row -> their headings in documents."""


@dataclass
class Swap:
    """One case: `quiet`, `during`, `control`: gaps in milliseconds between the tokens of `streams` streams; `during`
    those of each round, `control` those of as long a time in which nothing was published. `phases`: those of each round
    by phase, of a load. `publish_ms`: from the request to the moved name. `first_token_ms`: from the request (of a
    session: from the end of the optimizer step) to the first token of the new version. `unload_ms`: of the request that
    unloads the name. `stolen_ms`, `control_stolen_ms`: how long the machine's host kept the processors from running
    during the rounds and the controls, the mean of the processors; None where the system does not say it. `stopped_ms`,
    `control_stopped_ms`: by how much a thread that only sleeps woke too late at most, in each round and each control;
    `running`, `control_running`: as `during` and `control`, each gap without the machine's stops in it (`Naps`).
    """

    what: str
    size: str | None
    rank: int
    targets: str
    adapter_bytes: int
    streams: int
    quiet: list[float] = field(default_factory=list)
    during: list[list[float]] = field(default_factory=list)
    publish_ms: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)
    unload_ms: list[float] = field(default_factory=list)
    control: list[list[float]] = field(default_factory=list)
    phases: dict[str, list[list[float]]] = field(default_factory=dict)
    stolen_ms: float | None = None
    control_stolen_ms: float | None = None
    running: list[list[float]] = field(default_factory=list)
    control_running: list[list[float]] = field(default_factory=list)
    stopped_ms: list[float] = field(default_factory=list)
    control_stopped_ms: list[float] = field(default_factory=list)


def row_of(swap: Swap) -> dict[str, Any]:
    step = median(swap.quiet)
    rounds = {"": swap.during, "control_": swap.control, "running_": swap.running}
    rounds |= {"control_running_": swap.control_running, **{f"{name}_": swap.phases.get(name, []) for name in PHASES}}
    row = {name: getattr(swap, name) for name in ("what", "size", "rank", "targets", "adapter_bytes", "streams")}
    for name in ("publish_ms", "first_token_ms", "unload_ms"):
        values = getattr(swap, name)
        row[name] = median(values) if values else None
    return row | {
        "rounds": len(swap.during),
        "decode_step_ms": step,
        "longest_gap_ms": max(map(max, swap.during)),
        "quiet_stall_ms": max(0.0, max(swap.quiet) - step),
        **{f"{prefix}{key}": value for prefix, each in rounds.items() for key, value in _stalls(each, step)},
        "stolen_ms": swap.stolen_ms,
        "control_stolen_ms": swap.control_stolen_ms,
        "stopped_ms": max(swap.stopped_ms, default=None),
        "control_stopped_ms": max(swap.control_stopped_ms, default=None),
    }


def _stalls(rounds: Sequence[Sequence[float]], step: float) -> Iterator[tuple[str, float | None]]:
    """The longest of all rounds, and the median of each round's longest. `rounds`: the gaps of each."""
    longest = [max(gaps) for gaps in rounds if gaps]
    yield "stall_ms", max(0.0, max(longest) - step) if longest else None
    yield "median_stall_ms", max(0.0, median(longest) - step) if longest else None


def result_of(rows: Sequence[dict[str, Any]], rss_bytes: Sequence[int], streams_failed: int) -> dict[str, Any]:
    """`rss_bytes`: of the engine's process after each cycle. `longest_stall_ms`, `decode_step_ms`: of the row whose
    stall is the furthest above, or the least below, its bar, a decode step and `ALLOWED_MS`. `median_stall_ms`: of the
    row whose median is. The control's row is left out."""
    published = [row for row in rows if row["what"] != CONTROL]
    worst = max(published, key=lambda row: float(row["stall_ms"] - row["decode_step_ms"]))
    usual = max(published, key=lambda row: float(row["median_stall_ms"] - row["decode_step_ms"]))
    return {
        "publish_ms": {row["size"]: row["publish_ms"] for row in rows if row["what"] == "load"},
        "longest_stall_ms": worst["stall_ms"],
        "decode_step_ms": worst["decode_step_ms"],
        "median_stall_ms": usual["median_stall_ms"],
        "streams_failed": streams_failed,
        "rss_growth_bytes": growth(rss_bytes),
        "rows": list(rows),
    }


def growth(rss_bytes: Sequence[int]) -> int | None:
    """Growth after the first hundred cycles, or after the first tenth of fewer than a thousand; None without cycles."""
    if not rss_bytes:
        return None
    first = min(FIRST_CYCLES, max(1, len(rss_bytes) // 10))
    return rss_bytes[-1] - max(rss_bytes[:first])
