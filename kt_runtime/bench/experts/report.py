"""The result as tables for people."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from kt_runtime.cli.console import console_of_width
from kt_runtime.serve.memory.plan import format_bytes

LEGEND = (
    "of limit: share of what the machine's limit (DRAM, bf16, int8) allows. DRAM: reads between the calls; the share of"
    " the median call, of the slowest and the fastest. cached: the weights fit the last cache."
    " peers: how many times as long they take."
    " retain, recompute: forward and backward with LoRA."
)
NARROW = 100  # columns, if the output is no terminal


def print_report(result: dict[str, Any]) -> None:
    console = console_of_width(NARROW)
    console.print(_machine(result["machine"]))
    for title, rows in _grouped(result["rows"]).items():
        console.print(_rows(title, rows))
    console.print(_loads(result["loads"]))
    console.print(LEGEND, highlight=False)
    for peer, facts in result["peers"].items():
        if facts.get("problem"):
            console.print(f"{peer}: {facts['problem']}", highlight=False)
        for what, problem in facts["problems"].items():
            console.print(f"{peer}: {what}: {problem}", highlight=False)


def _machine(machine: dict[str, Any]) -> Table:
    table = Table("kernels", "threads", "DRAM read", "bf16 peak", "int8 peak", title=machine["cpu"])
    for limits in machine["by_threads"]:
        table.add_row(
            limits["isa"],
            str(limits["threads"]),
            f"{limits['dram_bytes_per_s'] / 1e9:.1f} GB/s",
            f"{limits['bf16_flops'] / 1e9:.0f} GFLOP/s",
            f"{limits['int8_ops'] / 1e9:.0f} Gop/s",
        )
    return table


def _grouped(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
        groups.setdefault(f"{row['shape']} {row['format']}, {row['isa']}, {threads}", []).append(row)
    return groups


def _rows(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(
        Column("tokens", justify="right"),
        Column("op", no_wrap=True),
        Column("ms", justify="right", no_wrap=True),
        Column("of limit", justify="right", no_wrap=True),
        Column("error", justify="right", no_wrap=True),
        Column("DRAM GB/s", justify="right", no_wrap=True),
        Column("share", justify="right", no_wrap=True),
        "peers",
        title=title,
        title_justify="left",
    )
    for row in rows:
        table.add_row(
            str(row["tokens"]),
            _operation(row),
            f"{row['ms']:.2f}",
            f"{row['limit_ratio']:.0%} {row['limit']}",
            f"{row['rel_error']:.4f}",
            f"{row['dram_bytes_per_s'] / 1e9:.1f}",
            _dram_share(row),
            ", ".join(f"{name} {ms / row['ms']:.2f}x" for name, ms in row["peers"].items()),
        )
    return table


def _dram_share(row: dict[str, Any]) -> str:
    shares = " ".join(f"{row[name]:.2f}" for name in ("dram_share", "dram_share_least", "dram_share_most"))
    return f"{shares} cached" if row["in_cache"] else shares


def _operation(row: dict[str, Any]) -> str:
    if row["ratio_to_forward"] is None:
        return "forward"
    return f"{row['activations']}, {row['ratio_to_forward']:.2f} x forward"


def _loads(loads: list[dict[str, Any]]) -> Table:
    table = Table("shape", "format", "kernels", "threads", "load", "resident", "peak extra / weights", title="loading")
    for load in loads:
        ratio = load["peak_extra_ratio"]
        table.add_row(
            load["shape"],
            load["format"],
            load["isa"],
            str(load["threads"]),
            f"{load['seconds']:.1f} s",
            f"{format_bytes(load['resident_bytes'])} ({load['resident_bytes'] / load['weight_bytes']:.3f})",
            "unknown" if ratio is None else f"{ratio:.3f}",
        )
    return table
