"""The result as tables for people."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from kt_runtime.bench.cache.plan import SOURCES
from kt_runtime.cli.console import console_of_width
from kt_runtime.serve.memory.plan import format_bytes

NARROW = 100  # columns, if the output is no terminal
READ_BAR, WRITE_BAR, FIRST_TOKEN_BAR = 0.8, 0.5, 5.0


def print_report(result: dict[str, Any]) -> None:
    console = console_of_width(NARROW)
    cache, files, system = result["cache"], result["files"], result["machine"]["file_system"]
    if result["ttft_ms"] is not None:
        console.print(_first_tokens(result))
    console.print(_files(result))
    console.print(
        f"Pages of {cache['page_tokens']} tokens, {format_bytes(files['page_bytes'])}, on {system}"
        f", {format_bytes(files['bytes'])} a round. Medians of {cache['rounds']} rounds, best in brackets.",
        highlight=False,
    )
    if system == "tmpfs":
        console.print("These files are in memory: name a directory on a disk with --directory.", highlight=False)
    if any(share is not None and share > 0.01 for share in files["cached_shares"]):
        console.print("The system still had some of the files in memory when they were read.", highlight=False)


def _first_tokens(result: dict[str, Any]) -> Table:
    cache, middle, least = result["cache"], result["ttft_ms"], result["ttft_ms_min"]
    table = Table(
        "prefix from",
        Column("first token", justify="right"),
        Column("cold / this", justify="right"),
        title=f"{cache['model']} in {cache['dtype']}, a prefix of {cache['tokens']} tokens",
    )
    for source in SOURCES:
        times = f"{middle[source]:.0f} ms ({least[source]:.0f})"
        wanted = f" (>= {FIRST_TOKEN_BAR:.0f})" if source == "disk" else ""
        table.add_row(source.replace("_", " "), times, f"{middle['cold'] / middle[source]:.1f}x{wanted}")
    return table


def _files(result: dict[str, Any]) -> Table:
    rates, best = result["files"]["bytes_per_s"], result["files"]["best_bytes_per_s"]
    table = Table(
        "files",
        Column("disk tier", justify="right"),
        Column("plain file", justify="right"),
        Column("ratio", justify="right"),
    )
    rows = {
        "write": f"{result['disk_write_ratio']:.2f} ({result['disk_write_ratio_best']:.2f}), >= {WRITE_BAR}",
        "read": f"{result['disk_read_ratio']:.2f} ({result['disk_read_ratio_best']:.2f}), >= {READ_BAR}",
        "read_warm": f"{result['disk_read_ratio_warm']:.2f}",
    }
    for use, ratio in rows.items():
        cells = [
            f"{rates[f'{side}_{use}'] / 1e6:.0f} MB/s ({best[f'{side}_{use}'] / 1e6:.0f})" for side in ("tier", "plain")
        ]
        table.add_row(use.replace("read_warm", "read, from the system's memory"), *cells, ratio)
    return table
