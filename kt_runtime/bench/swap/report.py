"""The result as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from kt_runtime.bench.swap.figures import ALLOWED_MS
from kt_runtime.cli.console import console_of_width

NARROW = 110  # columns, if the output is no terminal


def print_report(result: dict[str, Any]) -> None:
    console = console_of_width(NARROW)
    facts = result["swap"]
    headings = ("MB", "published, ms", "first token, ms", "unloaded, ms", "step, ms", "stall, ms", "stall before, ms")
    table = Table(
        "adapter",
        *(Column(heading, justify="right") for heading in headings),
        title=f"{facts['model']} in {facts['dtype']}",
    )
    for row in result["rows"]:
        name = f"{row['what']}: rank {row['rank']}, {row['targets']}, beside {row['streams']} streams"
        values = (row[key] for key in ("publish_ms", "first_token_ms", "unload_ms", "decode_step_ms", "stall_ms"))
        table.add_row(
            name,
            f"{row['adapter_bytes'] / 1e6:.0f}",
            *("" if value is None else f"{value:.0f}" for value in values),
            f"{row['quiet_stall_ms']:.0f}",
        )
    console.print(table)
    growth = result["rss_growth_bytes"]
    grown = "" if growth is None else f" In {facts['cycles']} cycles memory grew by {growth / 2**20:.1f} MiB."
    console.print(
        f"Longest stall {result['longest_stall_ms']:.0f} ms; one decode step and {ALLOWED_MS:.0f} ms are "
        f"{result['decode_step_ms'] + ALLOWED_MS:.0f} ms. Requests that failed: {result['streams_failed']}.{grown}",
        highlight=False,
    )
