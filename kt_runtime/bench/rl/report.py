"""The result as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from kt_runtime.cli.console import console_of_width

NARROW = 100  # columns, if the output is no terminal


def print_report(result: dict[str, Any]) -> None:
    console = console_of_width(NARROW)
    facts, runs = result["rl"], result["runs"]
    table = Table(
        "figure",
        Column("median", justify="right"),
        Column("all runs", justify="right"),
        title=f"{facts['model']} in {facts['dtype']}: {facts['prompts']} prompts of {facts['prompt_tokens']} tokens x "
        f"{facts['generations']} answers of {facts['new_tokens']}",
    )
    shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in result["share"].items())
    table.add_row("step, s", f"{result['step_s']:.2f}", _runs(runs["step_s"], 2))
    table.add_row(
        "publish to first token, ms",
        f"{result['publish_to_first_token_ms']:.0f}",
        _runs(runs["publish_to_first_token_ms"], 0),
    )
    table.add_row(f"{facts['group']} answers / one", f"{result['group_speedup']:.2f}x", _runs(runs["group_speedup"], 2))
    console.print(table)
    console.print(f"Shares of a step: {shares}. Largest kl/k3: {result['largest_k3']:g}.", highlight=False)


def _runs(values: list[float], decimals: int) -> str:
    return ", ".join(f"{value:.{decimals}f}" for value in values)
