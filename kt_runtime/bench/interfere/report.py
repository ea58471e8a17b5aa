"""The result as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from kt_runtime.cli.console import console_of_width

NARROW = 110  # columns, if the output is no terminal


def print_report(result: dict[str, Any]) -> None:
    console = console_of_width(NARROW)
    facts = result["interfere"]
    headings = ("TTFT p50/p95/p99, ms", "TPOT p50/p95/p99, ms", "requests/s in time", "training, tokens/s")
    table = Table(
        "load",
        "mode",
        *(Column(heading, justify="right") for heading in headings),
        title=f"{facts['model']} in {facts['dtype']}, capacity {result['capacity_requests_per_s']:.2f} requests/s; "
        f"targets {result['tpot_target_ms']:.1f} ms per token, {result['ttft_target_ms']:.0f} ms to the first",
    )
    for row in result["rows"]:
        trained = row["training_tokens_per_s"]
        table.add_row(
            f"{row['load']:g}",
            row["mode"].replace("_", " "),
            *("/".join(f"{value:.0f}" for value in row[kind].values()) for kind in ("ttft_ms", "tpot_ms")),
            f"{row['goodput_per_s']:.2f} of {row['requests_per_s']:.2f}",
            "" if trained is None else f"{trained:.0f}",
        )
    console.print(table)
    kept = result["training_kept"]
    shown = _percent(kept)
    console.print(
        f"At half load: TPOT p99 {result['p99_tpot_ratio']:.2f} times that without training; training keeps {shown} of "
        f"its {result['training_alone_tokens_per_s']:.0f} tokens/s times the {100 * result['left_over']:.0f} % of "
        f"capacity left over ({_percent(result['training_kept_of_idle'])} of it times the measured idle time of "
        f"{_percent(result['idle_share'])}, {_percent(result['training_kept_of_alone'])} of it in all); "
        f"goodput {result['goodput_ratio']:.1f} times that of whole calls, which train at "
        f"{_percent(result['plain_training_share'])} of that speed. Without requests "
        f"training has {100 * result['training_alone_share']:.0f} % of its speed alone.",
        highlight=False,
    )


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.0f} %"
