"""The result as tables for people."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from kt_runtime.cli.console import console_of_width
from kt_runtime.serve.memory.plan import format_bytes

NARROW = 140  # columns, if the output is no terminal
RATES = {"dram": "DRAM read", "to_device": "host to device", "to_host": "device to host", "device_memory": "GPU memory"}
ARITHMETIC = {"cpu_arithmetic": "CPU bf16", "device_arithmetic": "GPU bf16"}


def print_report(result: dict[str, Any]) -> None:
    console = console_of_width(NARROW)
    for model in result["gpu"]["layers"]:
        console.print(_table(model, [row for row in result["rows"] if row["model"] == model]))
    console.print(f"{result['machine']['gpu']}. Limits: {_limits(result['machine']['limits'])}.", highlight=False)
    console.print("Medians, in brackets the slowest run. A share is the limit's time / the measured time.")
    for row in result["rows"]:
        if row["problem"]:
            console.print(f"{_case(row)}: {row['problem']}", highlight=False, markup=False)
    for bar in result["bars"]:
        console.print(_bar(bar), highlight=False, markup=False)


def _table(model: str, rows: list[dict[str, Any]]) -> Table:
    right = [Column(name, justify="right") for name in ("tokens/s", "limit", "GPU memory")]
    table = Table(Column("engine", no_wrap=True), "experts", Column("case", no_wrap=True), *right, title=model)
    for row in rows:
        rate, limit, taken = row["tokens_per_s"], row["limit"], row["device_bytes"]
        table.add_row(
            row["engine"],
            row["setting"],
            _size(row),
            "not measured" if rate is None else f"{rate:.1f} ({row['tokens_per_s_least']:.1f})",
            "" if limit is None else f"{row['limit_share']:.2f} {limit}",
            "" if taken is None else format_bytes(taken),
        )
    return table


def _size(row: dict[str, Any]) -> str:
    return f"{row['case']}, {row['streams']} streams" if "streams" in row else f"{row['case']}, {row['tokens']} tokens"


def _case(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['engine']}, {row['setting']}, {_size(row)}"


def _limits(limits: dict[str, float]) -> str:
    rates = [f"{what} {limits[name] / 1e9:.1f} GB/s" for name, what in RATES.items()]
    return ", ".join([*rates, *(f"{what} {limits[name] / 1e12:.1f} TFLOP/s" for name, what in ARITHMETIC.items())])


def _bar(bar: dict[str, Any]) -> str:
    says = {None: "not measured", True: "met", False: "NOT met"}[bar["is_met"]]
    value = "" if bar["value"] is None else f" {bar['value']:.2f},"
    return f"{bar['model']}: {bar['what']}:{value} at least {bar['least']:g}: {says}"
