"""The tables of `kt-runtime cache`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from kt_runtime.serve.memory.plan import format_bytes

TROUBLES = ("dropped", "late", "read_errors", "write_errors")
MOST_SHOWN = 20


def print_tiers(answer: dict[str, Any]) -> None:
    """Prints a server's tiers. `answer`: `{"url", "tiers"}`."""
    tiers = answer["tiers"]
    if tiers:
        click.echo(f"{answer['url']}, since it began; pages of {tiers[0]['page_tokens']} tokens")
    table = Table("", *(Column(tier["tier"], justify="right") for tier in tiers))
    for name, show in ROWS.items():
        table.add_row(name, *(show(tier) for tier in tiers))
    Console().print(table)
    for tier in tiers:
        if tier["directory"] is not None:
            _print_disk(tier)


def _hit_rate(tier: dict[str, Any]) -> str:
    asked = tier["hits"] + tier["misses"]
    return f"{tier['hits'] / asked:.1%}" if asked else ""


def _copied(name: str) -> Callable[[dict[str, Any]], str]:
    """The column of copied bytes, empty for the device tier, whose pages are used in place."""
    return lambda tier: "" if tier["tier"] == "device" else format_bytes(tier[name])


ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "pages held": lambda tier: str(tier["pages"]),
    "they take": lambda tier: format_bytes(tier["used_bytes"]),
    "may take": lambda tier: format_bytes(tier["capacity_bytes"]),
    "hits (pages)": lambda tier: str(tier["hits"]),
    "misses (pages)": lambda tier: str(tier["misses"]),
    "hit rate": _hit_rate,
    "evicted (pages)": lambda tier: str(tier["evictions"]),
    "read": _copied("bytes_read"),
    "written": _copied("bytes_written"),
    "corrupt records": lambda tier: str(tier["corrupt"]) if tier["tier"] == "disk" else "",
}


def _print_disk(tier: dict[str, Any]) -> None:
    click.echo(f"disk: {tier['directory']}{' (only read)' if tier['read_only'] else ''}")
    for what in ("reading", "writing"):
        if tier[f"{what}_stopped"]:
            click.echo(f"disk: {what} has stopped: {tier[f'{what}_stopped']}")
    troubles = {name: tier["counters"].get(name, 0) for name in TROUBLES}
    if any(troubles.values()):
        click.echo("disk: " + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in troubles.items()))


def print_directory(found: dict[str, Any]) -> None:
    sizes = (f"{count} of {format_bytes(size)}" for size, count in sorted(found["slot_bytes"].items()) if count)
    kept = f"{len(found['quarantined'])} damaged, {format_bytes(found['quarantined_bytes'])}"
    table = Table(show_header=False)
    table.add_row("directory", found["directory"])
    table.add_row("records", str(found["records"]))
    table.add_row("on disk", format_bytes(found["disk_bytes"]))
    table.add_row("sizes of records", ", ".join(sizes) or "none")
    table.add_row("quarantined", kept if found["quarantined"] else "nothing")
    table.add_row("in use by", f"process {found['holder']}" if found["holder"] else "nobody")
    Console().print(table)


def print_caches(answer: dict[str, Any], address: str) -> None:
    """Prints the user's caches. `answer`: `{"root", "caches"}`. `address`: where no server answered."""
    click.echo(f"no server at {address}")
    if not answer["caches"]:
        click.echo(f"no cache in {answer['root']}; name another directory with --dir")
        return
    table = Table(
        Column("directory", overflow="fold"), "records", "on disk", "quarantined", "in use by", title=answer["root"]
    )
    for found in answer["caches"]:
        table.add_row(
            found["directory"].removeprefix(f"{answer['root']}/"),
            str(found["records"]),
            format_bytes(found["disk_bytes"]),
            str(len(found["quarantined"])),
            f"process {found['holder']}" if found["holder"] else "",
        )
    Console().print(table)


def print_verification(found: dict[str, Any]) -> None:
    damaged = found["damaged"]
    for damage in damaged[:MOST_SHOWN]:
        place = f"; kept as {damage['kept_as']}" if damage["kept_as"] else ""
        click.echo(f"{damage['record'] or 'a file'}: {damage['fault']}{place}")
    if len(damaged) > MOST_SHOWN:
        click.echo(f"... and {len(damaged) - MOST_SHOWN} more (--json lists all)")
    if not found["index_was_right"]:
        click.echo("the index was damaged and has been written anew; the order of use is that of writing now")
    state = f"{len(damaged)} damaged" if damaged else "all right"
    click.echo(f"{found['directory']}: {found['records']} records read in {found['seconds']:.1f} s, {state}")
