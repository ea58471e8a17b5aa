"""What a replica must still know after a restart: its name, revisions it has seen, what it has not published yet."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
from pathlib import Path

import msgspec

from kt_runtime.errors import InvalidValueError
from kt_runtime.files import write_file

logger = logging.getLogger(__name__)

DIRECTORY, FILE = ".registry", "state.json"
"""The state's directory, in the adapter directory, and its file. No adapter's name begins with a dot."""


class Pending(msgspec.Struct, kw_only=True, frozen=True):
    """A change of a name here that is not in the registry yet. `version` None: the name was unloaded.

    `after`: the newest revision that this replica had seen then. `is_old`: it is of an earlier run of the server.
    """

    version: str | None
    after: int
    is_old: bool = False


class NameState(msgspec.Struct, kw_only=True, frozen=True):
    """`seen`: the highest revision that was seen. `settled`: the newest that was in effect here, `version`: what it
    says. A name that means something else after a restart was changed by this server."""

    seen: int
    settled: int
    version: str | None
    pending: Pending | None = None


class State(msgspec.Struct, kw_only=True, frozen=True):
    """`registry`: its id, empty before the replica has joined one."""

    replica: str
    registry: str = ""
    names: dict[str, NameState] = {}


class StateFile:
    def __init__(self, adapter_directory: Path) -> None:
        self.directory = adapter_directory / DIRECTORY
        self.path = self.directory / FILE

    def read(self, port: int) -> State:
        """A new replica's state if there is no file, or none that can be read. Raises InvalidValueError if the
        directory can't be made."""
        try:
            self.directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise InvalidValueError(f"--adapter-dir: {self.directory}: can't be created ({error.strerror})") from None
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=State)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s: not read, so this server joins the registry as a new replica: %s", self.path, error)
        host = re.sub(r"[^A-Za-z0-9_.-]+", "-", socket.gethostname()).strip("-.") or "host"
        return State(replica=f"{host[:64]}-{port}-{secrets.token_hex(3)}")

    def write(self, state: State) -> None:
        """Raises OSError."""
        if not self.directory.is_dir():
            os.mkdir(self.directory, 0o700)
        write_file(self.path, msgspec.json.encode(state), private=True)
