"""`kt-runtime session`: list and close the training sessions of a running server.

A session stays open until it is closed, even after the run that opened it has ended.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kt_runtime.cli.connection import ServerAPI, resident_client, server_options, server_url
from kt_runtime.errors import ConflictError, UnknownNameError

IN_USE_SECONDS = 300.0
"""A session counts as in use if its last request is not older than this."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(name="session", help="List and close the training sessions of a running server.")
def command() -> None:
    pass


@command.command(name="list")
@server_options
@json_option
def list_sessions(url: str | None, api_key: str | None, as_json: bool) -> None:
    """The training sessions, the longest unused first."""
    sessions = _sessions(ServerAPI(server_url(url), api_key))
    if as_json:
        click.echo(json.dumps(sessions, indent=2))
        return
    table = Table("session", "publishes", "rank", "step", "memory", "age", "last used", "requests")
    for session in sorted(sessions, key=lambda session: -session["idle_s"]):
        table.add_row(
            session["session"],
            ", ".join(session["publishes"]),
            str(session["rank"]),
            str(session["step"]),
            f"{session['num_bytes'] / 1e9:.3g} GB",
            _duration(session["age_s"]),
            f"{_duration(session['idle_s'])} ago",
            str(session["num_requests"]),
        )
    Console().print(table)


@command.command()
@click.argument("name", metavar="SESSION")
@click.option("--yes", is_flag=True, help="Close it also when it is in use, without asking.")
@server_options
@json_option
def close(name: str, yes: bool, url: str | None, api_key: str | None, as_json: bool) -> None:
    """Close SESSION and free its memory. What it has published is served on; what it has not saved is lost.

    Asks before it closes a session that has a request in progress or had one in the last five minutes.
    """
    api = ServerAPI(server_url(url), api_key)
    sessions = {session["session"]: session for session in _sessions(api)}
    if name not in sessions:
        raise UnknownNameError("session", name, sessions)
    use = _use(sessions[name])
    if use is not None and not yes:
        if not sys.stdin.isatty():
            raise ConflictError(f"session {name!r} is in use ({use}): --yes closes it; its run ends with an error then")
        click.confirm(
            f"session {name!r} is in use ({use}); its run ends with an error. Close it?", abort=True, err=True
        )
    with resident_client(api) as client:
        client.close_session(name)
    freed = sessions[name]["num_bytes"]
    answer = {"session": name, "num_bytes": freed}
    click.echo(json.dumps(answer) if as_json else f"session {name} is closed, {freed / 1e9:.3g} GB are free again")


def _sessions(api: ServerAPI) -> list[dict[str, Any]]:
    sessions: list[dict[str, Any]] = api.get("/kt/status")["sessions"]
    return sessions


def _use(session: dict[str, Any]) -> str | None:
    """Why the session counts as in use; None if it does not."""
    if session["num_requests"]:
        return f"{session['num_requests']} requests of it are in progress or wait"
    if session["idle_s"] < IN_USE_SECONDS:
        return f"last used {_duration(session['idle_s'])} ago"
    return None


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
