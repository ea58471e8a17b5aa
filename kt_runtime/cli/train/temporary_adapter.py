"""The adapter for one command: a name that is already served, or a directory served during the command."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from kt_runtime.cli.connection import LOAD_SECONDS, ServerAPI
from kt_runtime.errors import KtError, NotFoundError, UnknownNameError

PREFIX = "temporary"
CONFIG_FILE = "adapter_config.json"


@contextlib.contextmanager
def adapter_in_use(
    api: ServerAPI, name: str | None, directory: Path | None, say: Callable[[str], None]
) -> Iterator[str | None]:
    """The name for requests: `name` if given, else a temporary name of `directory`, else None (the base).

    The temporary name is served while the context lasts. Raises UnknownNameError for a name that is not served, and
    the server's errors about the directory.
    """
    if name is not None:
        check_served(api, name)
        yield name
        return
    if directory is None:
        yield None
        return
    check_exists(directory)
    temporary = _free_name(api, directory)
    say(f"serving {directory} as {temporary} meanwhile")
    api.post("/kt/adapters", {"name": temporary, "path": str(directory.resolve())}, LOAD_SECONDS)
    try:
        yield temporary
    finally:
        try:
            api.delete(f"/kt/adapters/{temporary}")
        except KtError as error:
            say(f"{temporary} could not be unloaded: {error}")


def check_exists(directory: Path | None, where: str = "adapter_name_or_path") -> None:
    """Raises NotFoundError, with a message that starts with `where`, for an adapter that is not on this machine."""
    if directory is not None and not directory.exists():
        raise NotFoundError(f"{where}: {directory}: no such file or directory; nothing is downloaded")


def check_served(api: ServerAPI, name: str) -> None:
    served = served_names(api)
    if name not in served:
        raise UnknownNameError("adapter", name, served, f"{api.url}")


def served_names(api: ServerAPI) -> list[str]:
    return [adapter["name"] for adapter in api.get("/kt/adapters")["adapters"] if adapter["current"]]


def rank_of(directory: Path | None) -> int:
    """The rank in a PEFT directory's configuration, 0 if unreadable; the server validates the adapter at loading."""
    if directory is None:
        return 0
    try:
        rank = json.loads((directory / CONFIG_FILE).read_bytes())["r"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return rank if isinstance(rank, int) else 0


def _free_name(api: ServerAPI, directory: Path) -> str:
    """A name derived from `directory`, the same for all commands, so that few versions stay in the server's store.

    If another command uses that name already, the name gets a random suffix.
    """
    path = directory.resolve()
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.name)[:40]
    name = f"{PREFIX}-{readable}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    return f"{name}-{secrets.token_hex(3)}" if name in served_names(api) else name
