"""`kt-runtime cache`: look at the prefix cache, check its records on disk, empty it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kt_runtime.cache import inspection
from kt_runtime.cli.cache.place import cache_at, caches_in, not_at, only_cache
from kt_runtime.cli.cache.tables import print_caches, print_directory, print_tiers, print_verification
from kt_runtime.cli.connection import ServerAPI, server_options, server_url
from kt_runtime.errors import InvalidValueError, RuntimeFault, ServerUnreachableError
from kt_runtime.serve.cache_directory import caches_directory, claimed
from kt_runtime.wire import runtime_directory

CLEAR_SECONDS = 120.0
SHOW_SECONDS = 0.1

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def directory_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--dir", "directory", type=click.Path(path_type=Path), help=f"A cache directory. [default: {default}]"
    )


@click.group(name="cache", help=__doc__)
def command() -> None:
    pass


@command.command()
@directory_option("the server's tiers; without a server, every cache in the user's cache directory")
@server_options
@json_option
def stat(directory: Path | None, url: str | None, api_key: str | None, as_json: bool) -> None:
    """What is in the tiers of a running server, or in a directory, also while a server uses it."""
    _check_one_place(directory, url)
    if directory is not None:
        found = _describe(_cache_at(directory))
        _show(found, as_json, print_directory)
        return
    address = server_url(url)
    try:
        tiers = ServerAPI(address, api_key).get("/kt/status")["cache"]
    except ServerUnreachableError:
        if url is not None:
            raise
        root = caches_directory()
        caches = {"url": None, "root": str(root), "caches": [_describe(path) for path in caches_in(root)]}
        _show(caches, as_json, lambda shown: print_caches(shown, address))
    else:
        _show({"url": address, "tiers": tiers}, as_json, print_tiers)


@command.command()
@directory_option("the only one in the user's cache directory")
@json_option
@click.pass_context
def verify(ctx: click.Context, directory: Path | None, as_json: bool) -> None:
    """Read every record of a cache directory that no server writes to, and quarantine damaged ones.

    Exit status 1 if something was damaged; the cache can be used all the same.
    """
    path = _cache_at(directory) if directory is not None else only_cache("verify")
    with _held(path), _progress() as progress:
        begun_s = time.monotonic()
        result = inspection.verify(path, progress=progress)
        seconds = time.monotonic() - begun_s
    found = {"directory": str(path), **dataclasses.asdict(result), "faults": result.faults, "seconds": seconds}
    _show(found, as_json, print_verification)
    ctx.exit(1 if result.damaged or not result.index_was_right else 0)


@command.command()
@directory_option("the server's tiers")
@server_options
@json_option
def clear(directory: Path | None, url: str | None, api_key: str | None, as_json: bool) -> None:
    """Empty all tiers of a running server, or a directory that no server writes to.

    A server does it between two requests and keeps serving.
    """
    _check_one_place(directory, url)
    if directory is not None:
        path = _cache_at(directory)
        with _held(path):
            answer: dict[str, Any] = {"directory": str(path), "cleared": {"disk": inspection.clear(path)}}
    else:
        address = server_url(url)
        try:
            cleared = ServerAPI(address, api_key, timeout_s=CLEAR_SECONDS).post("/kt/cache/clear", {})["cleared"]
        except ServerUnreachableError as error:
            raise not_at(f"{error}; a directory that no server uses is emptied with --dir") from None
        answer = {"url": address, "cleared": cleared}
    _show(answer, as_json, _print_cleared)


def _check_one_place(directory: Path | None, url: str | None) -> None:
    if directory is not None and url is not None:
        raise InvalidValueError(f"--dir {directory} and --url {url}: a directory or a server, not both")


def _print_cleared(answer: dict[str, Any]) -> None:
    pages = ", ".join(f"{count} of the {tier}'s" for tier, count in answer["cleared"].items())
    click.echo(f"pages removed: {pages}")


def _cache_at(directory: Path) -> Path:
    with _explained(directory):
        return cache_at(directory)


def _describe(path: Path) -> dict[str, Any]:
    with _explained(path):
        return {"directory": str(path), **dataclasses.asdict(inspection.statistics(path))}


def _show(answer: dict[str, Any], as_json: bool, print_text: Callable[[dict[str, Any]], None]) -> None:
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        print_text(answer)


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Locks the directory, also against servers that are still starting. Raises ConflictError naming the holder."""
    with _explained(path), claimed(path, runtime_directory()):
        yield


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise InvalidValueError(
            f"--dir {path}: {error.filename or path} this user has no permission to use it"
        ) from None
    except OSError as error:
        if isinstance(error, RuntimeError | LookupError | ValueError) or error.errno is None:
            raise
        raise RuntimeFault(f"{path}: {error.strerror}") from error


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("verifying", total=None)
        shown_s = 0.0

        def show(done_bytes: int, total_bytes: int) -> None:
            nonlocal shown_s
            now_s = time.monotonic()
            if now_s - shown_s > SHOW_SECONDS or done_bytes == total_bytes:
                shown_s = now_s
                bar.update(task, completed=done_bytes, total=total_bytes)

        yield show
