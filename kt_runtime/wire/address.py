"""The resident's addresses: ipc:// sockets in private directories, and the checks of an address."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

from kt_runtime.errors import InvalidValueError, ServerUnreachableError

MAX_SOCKET_PATH_BYTES = 107  # sun_path of sockaddr_un (unix(7)) without its closing NUL
PROBE_SECONDS = 2.0


def runtime_directory() -> Path:
    """`kt-runtime` in XDG_RUNTIME_DIR, else `kt-runtime-<uid>` in the temporary directory. As `private_directory`."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir() and os.access(base, os.W_OK):
        return private_directory(Path(base) / "kt-runtime")
    return private_directory(Path(tempfile.gettempdir()) / f"kt-runtime-{os.geteuid()}")


def private_directory(path: Path) -> Path:
    """Creates `path` with mode 0700, or checks that an existing one belongs to this user and is closed to all others.

    Raises InvalidValueError.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise InvalidValueError(f"socket directory {path}: can't be created: {error.strerror}") from None
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidValueError(f"socket directory {path}: exists and is not a directory (symbolic links are refused)")
    if found.st_uid != os.geteuid():
        raise InvalidValueError(f"socket directory {path}: belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & 0o077:
        raise InvalidValueError(
            f"socket directory {path}: mode {stat.S_IMODE(found.st_mode):04o} lets others in; it must be 0700"
        )
    return path


def ipc_path(address: str) -> Path:
    """The socket file of an ipc:// address. Raises InvalidValueError unless absolute and at most 107 bytes long."""
    path = address.removeprefix("ipc://")
    if not (address.startswith("ipc://") and path.startswith("/")):
        raise InvalidValueError(
            f"address {address!r}: must be ipc:// and an absolute path, as in ipc:///run/user/1000/a.sock"
        )
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise InvalidValueError(
            f"address {address!r}: a socket's path may have {MAX_SOCKET_PATH_BYTES} bytes, this one has "
            f"{len(os.fsencode(path))}; set XDG_RUNTIME_DIR or TMPDIR to a shorter directory"
        )
    return Path(path)


def probe(address: str) -> None:
    """Raises ServerUnreachableError if no server listens at `address`. ZMQ itself would keep connecting for ever."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
            opened.settimeout(PROBE_SECONDS)
            opened.connect(str(ipc_path(address)))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ServerUnreachableError(
            f"no resident listens at {address} ({reason}); is `kt-runtime serve` running?"
        ) from None
