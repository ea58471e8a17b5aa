"""The result as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from kt_runtime.cli.console import console_of_width
from kt_runtime.serve.memory.plan import format_bytes

NARROW = 100  # columns, if the output is no terminal


def print_report(result: dict[str, Any]) -> None:
    console = console_of_width(NARROW)
    training, peer = result["training"], result["peers"]["hf_peft"]
    table = Table(
        "targets",
        "activations",
        Column("tokens/s", justify="right"),
        Column("HF + PEFT", justify="right"),
        Column("ratio", justify="right"),
        Column("peak", justify="right", no_wrap=True),
        Column("its peak", justify="right", no_wrap=True),
        title=f"{training['model']}, steps of {training['sequences']} x {training['tokens']} tokens,"
        f" rank {training['rank']}",
    )
    for row in result["rows"]:
        table.add_row(*_cells(row))
    console.print(table)
    legend = f"Medians, in brackets the shortest step. The server computes in {training['dtype']}, up to"
    legend += f" {training['microbatch_tokens']} tokens at once"
    legend += f", the peer in {peer['dtype']}, {training['micro_batch']} sequences at once." if peer else "."
    console.print(legend, highlight=False)


def _cells(row: dict[str, Any]) -> list[str]:
    has_peer = row["ratio"] is not None
    return [
        row["targets"],
        row["activations"],
        f"{row['tokens_per_s']:.1f} ({row['tokens_per_s_best']:.1f})",
        f"{row['hf_peft_tokens_per_s']:.1f} ({row['hf_peft_tokens_per_s_best']:.1f})" if has_peer else "",
        f"{row['ratio']:.2f}x" if has_peer else "",
        format_bytes(row["peak_bytes"]),
        format_bytes(row["hf_peft_peak_bytes"]) if has_peer else "",
    ]
