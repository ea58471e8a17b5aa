"""The result as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from kt_runtime.bench.swap.figures import ALLOWED_MS
from kt_runtime.cli.console import console_of_width

NARROW = 140  # columns, if the output is no terminal
COLUMNS = {
    "publish_ms": "published",
    "first_token_ms": "first token",
    "decode_step_ms": "step",
    "stall_ms": "stall",
    "median_stall_ms": "median",
    "control_stall_ms": "control",
    "control_median_stall_ms": "median",
    "publishing_stall_ms": "publishing",
    "stopped_ms": "stopped",
}
"""Times of a row -> their headings. The JSON has more."""


def print_report(result: dict[str, Any]) -> None:
    console = console_of_width(NARROW)
    facts = result["swap"]
    table = Table(
        Column("rank, targets, streams", no_wrap=True),
        *(Column(heading, justify="right", no_wrap=True) for heading in ("MB", *COLUMNS.values())),
        title=f"{facts['model']} in {facts['dtype']}: milliseconds, the longest stall of all rounds and their median",
    )
    for row in result["rows"]:
        name = f"{row['what']}: {row['rank']}, {row['targets']}, {row['streams']}"
        table.add_row(
            name,
            f"{row['adapter_bytes'] / 1e6:.0f}",
            *("" if row[key] is None else f"{row[key]:.0f}" for key in COLUMNS),
        )
    console.print(table)
    growth = result["rss_growth_bytes"]
    grown = "" if growth is None else f" In {facts['cycles']} cycles memory grew by {growth / 2**20:.1f} MiB."
    console.print(
        f"Longest stall {result['longest_stall_ms']:.0f} ms, {result['median_stall_ms']:.0f} in the median of rounds; "
        f"one decode step and {ALLOWED_MS:.0f} ms are "
        f"{result['decode_step_ms'] + ALLOWED_MS:.0f} ms. Requests that failed: {result['streams_failed']}.{grown}",
        highlight=False,
    )
