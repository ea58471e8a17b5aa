"""The result as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from kt_runtime.bench.swap.figures import ALLOWED_MS, PHASES
from kt_runtime.cli.console import console_of_width

NARROW = 130  # columns, if the output is no terminal


def print_report(result: dict[str, Any]) -> None:
    console = console_of_width(NARROW)
    facts = result["swap"]
    headings = (
        "MB",
        "published",
        "first token",
        "unloaded",
        "step",
        "stall",
        "median",
        "control",
        "its median",
        *(f"stall, {phase.replace('_', ' ')}" for phase in PHASES),
        "stolen",
        "stopped",
    )
    table = Table(
        "adapter",
        *(Column(heading, justify="right") for heading in headings),
        title=f"{facts['model']} in {facts['dtype']}: milliseconds, the longest stall of all rounds and their median",
    )
    for row in result["rows"]:
        name = f"{row['what']}: rank {row['rank']}, {row['targets']}, beside {row['streams']} streams"
        keys = ["publish_ms", "first_token_ms", "unload_ms", "decode_step_ms", "stall_ms", "median_stall_ms"]
        keys += ["control_stall_ms", "control_median_stall_ms"]
        keys += [*(f"{phase}_stall_ms" for phase in PHASES), "stolen_ms", "stopped_ms"]
        table.add_row(
            name,
            f"{row['adapter_bytes'] / 1e6:.0f}",
            *("" if row[key] is None else f"{row[key]:.0f}" for key in keys),
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
