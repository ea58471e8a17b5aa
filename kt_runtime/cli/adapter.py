"""`kt-runtime adapter`: load, unload, list, show and roll back the adapters of a running server."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kt_runtime.cli.connection import ServerAPI, server_options, server_url

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(name="adapter", help=__doc__)
def command() -> None:
    pass


def _api(url: str | None, api_key: str | None) -> ServerAPI:
    return ServerAPI(server_url(url), api_key)


@command.command()
@click.argument("name")
@click.argument("directory", type=click.Path(path_type=Path))
@server_options
@json_option
def load(name: str, directory: Path, url: str | None, api_key: str | None, as_json: bool) -> None:
    """Serve the PEFT adapter in DIRECTORY (on the server's machine) as NAME."""
    answer = _api(url, api_key).post("/kt/adapters", {"name": name, "path": str(directory.resolve())})
    _say(answer, as_json)


@command.command()
@click.argument("name")
@server_options
@json_option
def unload(name: str, url: str | None, api_key: str | None, as_json: bool) -> None:
    """Stop serving NAME. Its versions stay on disk; requests under way finish."""
    answer = _api(url, api_key).delete(f"/kt/adapters/{name}")
    click.echo(json.dumps(answer) if as_json else f"{name} is no longer served")


@command.command()
@click.argument("name")
@click.option("--version", help="A version's hash or the beginning of it. [default: the one before]")
@server_options
@json_option
def rollback(name: str, version: str | None, url: str | None, api_key: str | None, as_json: bool) -> None:
    """Move NAME back to an earlier version."""
    _say(_api(url, api_key).post(f"/kt/adapters/{name}/rollback", {"version": version}), as_json)


@command.command(name="list")
@server_options
@json_option
def list_adapters(url: str | None, api_key: str | None, as_json: bool) -> None:
    """The adapters and their current versions."""
    adapters = _api(url, api_key).get("/kt/adapters")["adapters"]
    if as_json:
        click.echo(json.dumps(adapters, indent=2))
        return
    table = Table("name", "current version", "versions kept", "rank", "source")
    for adapter in adapters:
        current = _current(adapter)
        table.add_row(
            adapter["name"],
            (adapter["current"] or "not served")[:16],
            str(len(adapter["versions"])),
            str(current["rank"]) if current else "",
            current["source"] if current else "",
        )
    Console().print(table)


@command.command()
@click.argument("name")
@server_options
@json_option
def show(name: str, url: str | None, api_key: str | None, as_json: bool) -> None:
    """All versions of NAME, newest first."""
    adapter = _api(url, api_key).get(f"/kt/adapters/{name}")
    if as_json:
        click.echo(json.dumps(adapter, indent=2))
        return
    table = Table("", "version", "rank", "alpha", "made", "source")
    for version in adapter["versions"]:
        table.add_row(
            "current" if version["version"] == adapter["current"] else "",
            version["version"][:16],
            str(version["rank"]),
            f"{version['alpha']:g}",
            datetime.fromtimestamp(version["created_at"]).isoformat(sep=" ", timespec="seconds"),
            version["source"],
        )
    Console().print(table)


def _current(adapter: dict[str, Any]) -> dict[str, Any] | None:
    return next((version for version in adapter["versions"] if version["version"] == adapter["current"]), None)


def _say(answer: dict[str, Any], as_json: bool) -> None:
    line = f"{answer['name']} is version {answer['version'][:16]} now ({answer['publish_ms']:.0f} ms)"
    click.echo(json.dumps(answer) if as_json else line)
