"""`kt-runtime status`: a running server, and the replicas of its registry."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.table import Table

from kt_runtime.cli.connection import ServerAPI, server_options, server_url
from kt_runtime.cli.console import console_of_width
from kt_runtime.serve.memory.plan import format_bytes

SHOWN = 16
"""Characters of a hash."""
NARROW = 120  # columns, if the output is no terminal
SLOW_SECONDS = 5.0


@click.command(name="status")
@server_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON: GET /kt/status.")
def command(url: str | None, api_key: str | None, as_json: bool) -> None:
    """Show a running server, and with --registry on which replicas each adapter's name has moved."""
    status = ServerAPI(server_url(url), api_key).get("/kt/status")
    if as_json:
        click.echo(json.dumps(status, indent=2))
        return
    click.echo(
        f"{status['model']} ({status['model_directory']}) on {status['device']}, {status['dtype']}; kt-runtime "
        f"{status['runtime_version']}, SGLang {status['sglang_version']}"
    )
    click.echo(
        f"{status['requests_in_flight']} requests, {len(status['sessions'])} training sessions, "
        f"{len(status['adapters'])} adapters; weights {status['fingerprint'][:SHOWN] or 'not hashed yet'}"
    )
    if ranks := status.get("ranks"):
        _show_ranks(ranks)
    if status.get("registry") is not None:
        _show_registry(status["registry"])


def _show_ranks(ranks: list[dict[str, Any]]) -> None:
    """The slowest rank is the one for which the others wait."""
    hosts = {each["host"]: each["address"] for each in ranks}
    if len(hosts) > 1:
        places = ", ".join(f"host {number} ({address})" for number, address in sorted(hosts.items()))
        click.echo(f"{len(ranks)} ranks on {len(hosts)} hosts: {places}")
    table = Table(
        "rank", "host", "process", "experts of a layer", "weights", "memory", "most memory", "waits for others"
    )
    for each in ranks:
        experts = f"{each['first_expert']} to {each['first_expert'] + each['num_experts'] - 1}"
        sizes = (each["dense_bytes"] + each["expert_bytes"], each["rss_bytes"], each["peak_bytes"])
        waits = f"{100 * each['waiting_share']:.0f} %{', the slowest' if each['is_slowest'] else ''}"
        place = (str(each["rank"]), str(each["host"]), str(each["pid"]))
        table.add_row(*place, experts, *map(format_bytes, sizes), waits)
    console_of_width(NARROW).print(table)
    for each in ranks:
        for what in ("reading", "writing"):
            if (disk := each.get("disk")) and disk[f"{what}_stopped"]:
                click.echo(f"rank {each['rank']}: {what} {disk['directory']} has stopped: {disk[f'{what}_stopped']}")


def _show_registry(registry: dict[str, Any]) -> None:
    console = console_of_width(NARROW)
    click.echo(f"registry {registry['place']}, this server is {registry['replica']}")
    if registry["problem"] is not None:
        click.echo(f"registry: {registry['problem']}")
    if registry["waiting_s"] > SLOW_SECONDS:
        click.echo(f"registry: has not answered for {registry['waiting_s']:.0f} s")
    replicas = Table("replica", "server", "names behind", "last sign", "its clock")
    for each in registry["replicas"]:
        name = f"{each['replica']}{' (this)' if each['is_this'] else ''}"
        offset = f"{each['clock_offset_s']:+.1f} s"
        replicas.add_row(name, each["url"], str(each["behind"]), f"{each['silent_s']:.0f} s ago", offset)
    console.print(replicas)
    names = Table("adapter", "revision", "version", "published by", "not moved on")
    for each in registry["names"]:
        version = "unloaded" if each["version"] is None else each["version"][:SHOWN]
        names.add_row(each["name"], str(each["revision"]), version, each["published_by"], _not_moved(each))
    console.print(names)


def _not_moved(name: dict[str, Any]) -> str:
    lines = [
        f"{each['replica']} (at revision {each['revision']}): {each['problem'] or 'on its way'}"
        for each in name["not_moved"]
    ]
    if name["is_unpublished"]:
        lines.append(f"this server's change is not in the registry: {name['problem'] or 'on its way'}")
    return "\n".join(lines)
