"""The result as a table for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Column, Table

from kt_runtime.cli.console import console_of_width

NARROW = 110  # columns, if the output is no terminal


def print_report(result: dict[str, Any]) -> None:
    console = console_of_width(NARROW)
    if "rounds" in result:
        _print_replicas(console, result)
    if "ranks" in result:
        _print_ranks(console, result["ranks"])


def _print_ranks(console: Console, found: dict[str, Any]) -> None:
    headings = ("streams", "ranks, tokens/s", "one process, tokens/s", "ratio", "same tokens")
    table = Table(
        *(Column(heading, justify="right") for heading in headings),
        title=f"{found['model']} on {found['ranks']} ranks of one core each, beside one process with as many cores",
    )
    for row in found["rows"]:
        rates = (f"{row['tokens_per_s']:.1f}", f"{row['one_process_tokens_per_s']:.1f}", f"{row['ratio']:.2f}")
        table.add_row(str(row["streams"]), *rates, f"{row['same_tokens']:.3f}")
    console.print(table)
    console.print(f"The bar is {found['bar']}.", *found["problems"], highlight=False)
    _print_memory(console, found["memory"])


def _print_memory(console: Console, memory: dict[str, Any]) -> None:
    table = Table(
        *(
            Column(heading, justify="right")
            for heading in ("rank", "share, MiB", "loaded", "between calls", "at the peak")
        ),
        title="Memory of a rank, over its weights (over weights and KV cache)",
    )
    for row in memory["rows"]:
        ratios = zip(row["of_weights"].values(), row["of_weights_and_cache"].values(), strict=True)
        cells = (f"{alone:.3f} ({both:.3f})" for alone, both in ratios)
        table.add_row(str(row["rank"]), f"{row['weight_bytes'] / 2**20:.0f}", *cells)
    console.print(table)
    bars = memory["bars"]
    console.print(
        f"The bars are {bars['loaded']} loaded, {bars['between_calls']} while training. Subtracted is a rank of "
        f"{memory['base_model']}, {memory['base_bytes'] / 2**20:.0f} MiB.",
        highlight=False,
    )


def _print_replicas(console: Console, result: dict[str, Any]) -> None:
    facts = result["scale"]
    table = Table(
        "round",
        *(
            Column(heading, justify="right")
            for heading in ("published, ms", "first token here, ms", "last replica, ms")
        ),
        title=f"{facts['adapter_bytes'] / 1e6:.0f} MB to {facts['replicas']} replicas of {facts['model']}",
    )
    for number, row in enumerate(result["rounds"], 1):
        times = row["first_token_ms"]
        table.add_row(str(number), *(f"{each:.0f}" for each in (row["publish_ms"], times[0], max(times))))
    console.print(table)
    console.print(
        f"Last replica's first token: median {result['last_first_token_ms']:.0f} ms, longest "
        f"{result['worst_last_first_token_ms']:.0f} ms; the bar is {result['bar_ms']:.0f} ms. "
        f"{result['requests_failed']} of {result['requests']} requests failed.",
        highlight=False,
    )
