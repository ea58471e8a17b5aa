"""`kt-runtime adapter`: load, unload, list, show, roll back and export the adapters of a running server."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kt_runtime.cli.connection import LOAD_SECONDS, ServerAPI, server_options, server_url
from kt_runtime.errors import InvalidValueError

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(name="adapter", help=__doc__)
def command() -> None:
    pass


def _api(url: str | None, api_key: str | None) -> ServerAPI:
    return ServerAPI(server_url(url), api_key)


@command.command()
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--take-over", is_flag=True, help="Also when a training run publishes NAME, which it can't any more then."
)
@server_options
@json_option
def load(name: str, path: Path, take_over: bool, url: str | None, api_key: str | None, as_json: bool) -> None:
    """Serve the adapter at PATH as NAME.

    PATH is a PEFT directory or a GGUF file, on the server's machine.
    """
    body = {"name": name, "path": str(path.resolve())} | ({"take_over": True} if take_over else {})
    answer = _api(url, api_key).post("/kt/adapters", body, LOAD_SECONDS)
    _say(answer, as_json)


@command.command()
@click.argument("name")
@server_options
@json_option
def unload(name: str, url: str | None, api_key: str | None, as_json: bool) -> None:
    """Stop serving NAME. Its versions stay on disk; requests in progress finish."""
    answer = _api(url, api_key).delete(f"/kt/adapters/{name}")
    click.echo(json.dumps(answer) if as_json else f"{name} is no longer served")


@command.command()
@click.argument("name")
@click.argument("version", required=False)
@click.option("--version", "named", help="The same as VERSION.")
@server_options
@json_option
def rollback(
    name: str, version: str | None, named: str | None, url: str | None, api_key: str | None, as_json: bool
) -> None:
    """Move NAME back to an earlier version: the one before, or VERSION.

    VERSION is a version's hash, or at least the first four digits of it, as `adapter show NAME` lists them.
    """
    if version is not None and named is not None and version != named:
        raise InvalidValueError(f"VERSION {version} and --version {named} name two versions: leave one of them out")
    _say(_api(url, api_key).post(f"/kt/adapters/{name}/rollback", {"version": version or named}, LOAD_SECONDS), as_json)


@command.command(name="list")
@server_options
@json_option
def list_adapters(url: str | None, api_key: str | None, as_json: bool) -> None:
    """The adapters and their current versions."""
    adapters = _api(url, api_key).get("/kt/adapters")["adapters"]
    if as_json:
        click.echo(json.dumps(adapters, indent=2))
        return
    table = Table("name", "current version", "versions kept", "rank", "source", "published by", "stored")
    for adapter in adapters:
        current = _current(adapter)
        table.add_row(
            adapter["name"],
            (adapter["current"] or "not served")[:16],
            str(len(adapter["versions"])),
            str(current["rank"]) if current else "",
            current["source"] if current else "",
            _owner(adapter),
            "yes" if all(version["stored"] for version in adapter["versions"]) else "no",
        )
    Console().print(table)
    for adapter in adapters:
        _say_problems(adapter)


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
    table = Table("", "version", "rank", "alpha", "made", "source", "stored")
    for version in adapter["versions"]:
        table.add_row(
            "current" if version["version"] == adapter["current"] else "",
            version["version"][:16],
            str(version["rank"]),
            f"{version['alpha']:g}",
            _time(version["created_at"]),
            version["source"],
            "yes" if version["stored"] else "no",
        )
    Console().print(table)
    if adapter["owner"]:
        click.echo(f"{name} is published by session {_owner(adapter)}")
    _say_problems(adapter)


@command.command()
@click.argument("source", metavar="NAME|PATH")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["peft", "sglang", "merged", "gguf"]),
    default="peft",
    show_default=True,
    help="A PEFT directory (sglang: with a pair for each expert where PEFT has them fused, in gpt-oss), a whole "
    "checkpoint with the adapter merged in, or llama.cpp's LoRA file, which can't have "
    "kv_b_proj (of DeepSeek and Kimi-K2): llama.cpp has no LoRA for it.",
)
@click.option("--version", help="Of a served NAME: its hash, or the first digits of it. [default: current]")
@click.option("--base", help="The base model, as for serve. [default: the server's, or what the adapter names]")
@click.option("--overwrite", is_flag=True, help="Replace OUT if an export wrote it.")
@click.option("--shard-size", default=5.0, show_default=True, help="Of a merged checkpoint's files, in GB.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="[default: peft the adapter's, merged the base's (bfloat16 if that is quantized), gguf float32]",
)
@server_options
@json_option
def export(
    source: str,
    out: Path,
    form: str,
    version: str | None,
    base: str | None,
    overwrite: bool,
    shard_size: float,
    dtype: str | None,
    url: str | None,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Write the adapter NAME of the server, or the one at PATH, to OUT, which must not exist without --overwrite.

    PATH is a PEFT directory (KTransformers' included) or a GGUF file.
    """
    from kt_runtime.cli.adapter.exports import check_place, export_adapter
    from kt_runtime.cli.adapter.place import choose_adapter

    check_place(out, overwrite=overwrite)
    notes: list[str] = []
    say = notes.append if as_json else lambda line: click.echo(line, err=True)
    chosen = choose_adapter(source, version, base, lambda: _api(url, api_key))
    export_adapter(chosen, out, form, say, dtype=dtype, shard_gigabytes=shard_size, overwrite=overwrite)
    answer = {"format": form, "path": str(out.resolve()), "adapter": chosen.described, "notes": notes}
    click.echo(json.dumps(answer) if as_json else f"{chosen.described} is in {out}")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")


def _owner(adapter: dict[str, Any]) -> str:
    return f"{adapter['owner']} since {_time(adapter['owned_since'])}" if adapter["owner"] else ""


def _say_problems(adapter: dict[str, Any]) -> None:
    """Prints an adapter's problems, which do not fit into a table."""
    if adapter["problem"]:
        click.echo(f"{adapter['name']} is not served: {adapter['problem']}")
    for version in adapter["versions"]:
        if not version["stored"]:
            click.echo(f"{adapter['name']}, version {version['version'][:16]} is not stored: {version['not_stored']}")


def _current(adapter: dict[str, Any]) -> dict[str, Any] | None:
    return next((version for version in adapter["versions"] if version["version"] == adapter["current"]), None)


def _say(answer: dict[str, Any], as_json: bool) -> None:
    line = f"{answer['name']} is version {answer['version'][:16]} now ({answer['publish_ms']:.0f} ms)"
    click.echo(json.dumps(answer) if as_json else line)
