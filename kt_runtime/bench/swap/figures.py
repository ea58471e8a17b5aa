"""The arithmetic of `bench swap`.

A stream's tokens come one decode step apart, more or less. A *stall* is by how much the longest gap between two tokens
of any stream, while an adapter is published, exceeds the median gap of the same streams right before, the decode step.
The streams also have longest gaps while nothing is published (`quiet_stall_ms`): what the machine adds by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

FIRST_CYCLES = 100
"""Memory grows in these, while caches fill; what it grows by afterwards is what counts."""
ALLOWED_MS = 10.0


@dataclass
class Swap:
    """One case: `quiet`, `during`: gaps in milliseconds between the tokens of `streams` streams. `publish_ms`: from the
    request to the moved name. `first_token_ms`: from the request (of a session: from the end of the optimizer step) to
    the first token of the new version. `unload_ms`: of the request that unloads the name."""

    what: str
    size: str | None
    rank: int
    targets: str
    adapter_bytes: int
    streams: int
    quiet: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    publish_ms: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)
    unload_ms: list[float] = field(default_factory=list)


def row_of(swap: Swap) -> dict[str, Any]:
    step = median(swap.quiet)
    row = {name: getattr(swap, name) for name in ("what", "size", "rank", "targets", "adapter_bytes", "streams")}
    for name in ("publish_ms", "first_token_ms", "unload_ms"):
        values = getattr(swap, name)
        row[name] = median(values) if values else None
    return row | {
        "rounds": len(swap.publish_ms),
        "decode_step_ms": step,
        "longest_gap_ms": max(swap.during),
        "stall_ms": max(0.0, max(swap.during) - step),
        "quiet_stall_ms": max(0.0, max(swap.quiet) - step),
    }


def result_of(rows: Sequence[dict[str, Any]], rss_bytes: Sequence[int], streams_failed: int) -> dict[str, Any]:
    """`rss_bytes`: of the engine's process after each cycle. `longest_stall_ms`, `decode_step_ms`: of the row whose
    stall is the furthest above, or the least below, its bar, a decode step and `ALLOWED_MS`."""
    worst = max(rows, key=lambda row: float(row["stall_ms"] - row["decode_step_ms"]))
    return {
        "publish_ms": {row["size"]: row["publish_ms"] for row in rows if row["what"] == "load"},
        "longest_stall_ms": worst["stall_ms"],
        "decode_step_ms": worst["decode_step_ms"],
        "streams_failed": streams_failed,
        "rss_growth_bytes": growth(rss_bytes),
        "rows": list(rows),
    }


def growth(rss_bytes: Sequence[int]) -> int | None:
    """After the first hundred cycles, or their first tenth if there are fewer than a thousand. None without cycles."""
    if not rss_bytes:
        return None
    first = min(FIRST_CYCLES, max(1, len(rss_bytes) // 10))
    return rss_bytes[-1] - max(rss_bytes[:first])
