"""`kt-runtime settings`: show and change the settings of a running server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kt_runtime.cli.connection import ServerAPI, server_options, server_url
from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.wire.settings import KEYS, Settings, changed

WEIGHT = "weight."
NONE = "none"
MEANINGS = {
    "tpot_target_ms": "time per output token to keep while training runs, in ms",
    "ttft_target_ms": "time to the first token to keep while training runs, in ms",
    "train_share": "largest share of time for training while requests run",
    "schedule": "slices between batches, or whole_calls for comparison",
}


@click.command(name="settings")
@click.argument("changes", nargs=-1, metavar="[KEY=VALUE ...]")
@server_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(changes: tuple[str, ...], url: str | None, api_key: str | None, as_json: bool) -> None:
    """Show the settings of a running server, and change those that are named.

    \b
    tpot_target_ms=40    time per output token that is kept while training runs; none: no target
    ttft_target_ms=500   time to the first token; none: no target
    train_share=0.5      largest share of time for training while requests run
    schedule=slices      or whole_calls: each training call runs to its end, for comparison
    weight.SESSION=2     a training session's weight among the others; 1 takes it away
    """
    wanted = parsed(changes)
    changed(Settings(), wanted)  # refuses a bad value without the server
    api = ServerAPI(server_url(url), api_key)
    settings = api.patch("/kt/settings", wanted) if wanted else api.get("/kt/settings")
    if as_json:
        click.echo(json.dumps(settings, indent=2))
        return
    table = Table("setting", "value", "meaning")
    for key, meaning in MEANINGS.items():
        value = settings[key]
        table.add_row(key, NONE if value is None else str(value), meaning)
    for session, weight in sorted(settings["weights"].items()):
        table.add_row(f"{WEIGHT}{session}", f"{weight:g}", "the session's weight; others have 1")
    Console().print(table)


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """The body of PATCH /kt/settings. Raises InvalidValueError, and UnknownNameError for an unknown key."""
    changes: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise InvalidValueError(f"{argument!r}: expected KEY=VALUE, such as tpot_target_ms=40")
        session = key.removeprefix(WEIGHT)
        if session != key and session:
            of_sessions = changes.setdefault("weights", {})
            _check_once(key, session in of_sessions)
            of_sessions[session] = _value(text)
            continue
        if key not in MEANINGS:
            raise UnknownNameError("setting", key, [*(name for name in KEYS if name in MEANINGS), f"{WEIGHT}SESSION"])
        _check_once(key, key in changes)
        changes[key] = text if key == "schedule" else _value(text)
    return changes


def _check_once(key: str, is_there: bool) -> None:
    if is_there:
        raise InvalidValueError(f"{key}: given twice")


def _value(text: str) -> float | str | None:
    """A number, None for "none", or the text itself, which the check refuses."""
    if text == NONE:
        return None
    try:
        return float(text)
    except ValueError:
        return text
