"""The result as a table for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Column, Table

from kt_runtime.cli.console import console_of_width

NARROW = 140  # columns, if the output is no terminal: room for three peers


def print_report(result: dict[str, Any]) -> None:
    console = console_of_width(NARROW)
    serving, peers, limits = result["serving"], result["peers"], result["machine"]["limits"]
    right = [Column(name, justify="right") for name in ("tokens/s", "of limit", *peers)]
    weights = serving["dtype"] if serving["gguf"] is None else f"{serving['gguf']['mix']} (GGUF)"
    title = f"{serving['model']} in {weights} over HTTP, {serving['runs']} runs"
    table = Table(Column("case", no_wrap=True), *right, title=title)
    for row in result["rows"]:
        table.add_row(*_cells(row, list(peers)))
    console.print(table)
    legend = "Medians, in brackets the best run; beside a peer's rate kt-runtime's as a multiple of it."
    legend += f" A stream has a prompt of {serving['prompt_tokens']} tokens and {serving['new_tokens']} new ones;"
    legend += f" adapters have rank {serving['rank']} on all targets."
    console.print(legend, highlight=False)
    for row in result["rows"]:
        _print_row(console, row)
    if limits is not None:
        rates = f"DRAM read {limits['dram_bytes_per_s'] / 1e9:.1f} GB/s, bf16 peak {limits['bf16_flops'] / 1e9:.0f}"
        console.print(f"Limits: {rates} GFLOP/s, {limits['isa']}, {limits['threads']} threads.", highlight=False)
    for name, found in (result["logprobs"]["peers"] | {"the format": result["logprobs"]["format"]}).items():
        if found is not None:
            line = f"{name}: |difference| of log-probabilities {found['mean']:.2g} in the mean, {found['largest']:.2g}"
            console.print(f"{line} at most, {found['tokens']} tokens.", highlight=False)
    for name, peer in peers.items():
        if peer["problem"]:
            console.print(f"{name}: {peer['problem']}", highlight=False, markup=False)


def _print_row(console: Console, row: dict[str, Any]) -> None:
    """What has no place in the table."""
    if (step := row["step"]) is not None:
        share = "" if step["limit_share"] is None else f", {step['limit_share']:.2f} {step['limit']}"
        line = f"{_case(row)}: of a token's time the native step takes {step['ms']:.2f} ms{share}; "
        line += f"head {step['head_ms']:.2f} ms; sampling {step['sampling_ms']:.2f} ms; "
        line += f"scheduling and HTTP {step['rest_ms']:.2f} ms."
        line += "".join(f" {name}'s time / step and head: {ratio:.2f}." for name, ratio in step["peers"].items())
        console.print(line, highlight=False)
    if row["problem"] is not None:
        console.print(f"{_case(row)}: {row['problem']}", highlight=False, markup=False)


def _case(row: dict[str, Any]) -> str:
    size = f"{row['tokens']} tokens" if row["case"] == "prefill" else f"{row['streams']} streams"
    return f"{row['case']}, {size}{', adapters' if row['adapters'] else ''}"


def _cells(row: dict[str, Any], peers: list[str]) -> list[str]:
    rate, share = row["tokens_per_s"], row["limit_share"]
    return [
        _case(row),
        "not measured" if rate is None else f"{rate:.1f} ({row['tokens_per_s_best']:.1f})",
        "" if share is None else f"{share:.2f} {row['limit']}",
        *(_peer(row, name) for name in peers),
    ]


def _peer(row: dict[str, Any], name: str) -> str:
    rate = row["peers"].get(name)
    return "" if rate is None else f"{rate:.1f} ({row['peers_best'][name]:.1f}), {row['tokens_per_s'] / rate:.2f}x"
