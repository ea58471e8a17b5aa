"""A real server's disk fails: `install` changes the process that calls it, and its forks.

FAULTY_DISK names a JSON file that says what goes wrong just now with files under its "directory":

- "fail": {operation: errno}; the operations are open, make (a directory), read, write, sync, remove, rename.
- "hang": [operation, ...]; they wait until the file says otherwise.
- "kill_at_write": n; at the n-th write from now on half of it is written and the process group is killed.

The files, what else happens to them, and the server are real; without a fault the calls do what they always do.

Each call that fails adds a byte to the file beside it that `failures_file` names. A use of the disk that was stopped is
tried again every second or two, and not, as ever, at first after two seconds and at last once a minute.

FAULTY_DISK_PATIENCE_S: in place of the tier's own patience, two seconds, for which a thread may wait on a busy machine.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kt_runtime.cache import disk_tier
from kt_runtime.cache.disk_tier import DiskTierSettings

CONTROL = "FAULTY_DISK"
PATIENCE = "FAULTY_DISK_PATIENCE_S"
OPERATIONS = {
    "mkdir": "make",
    "preadv": "read",
    "pwritev": "write",
    "ftruncate": "write",
    "fdatasync": "sync",
    "fsync": "sync",
    "unlink": "remove",
    "replace": "rename",
}
LONGEST_RETRY_S = 1.5
_said = ""  # by the control file, last time
_num_writes = 0  # since then


def failures_file(control: str | os.PathLike[str]) -> Path:
    return Path(control).with_suffix(".failures")


def faults() -> dict[str, Any]:
    global _said, _num_writes
    try:
        with open(os.environ[CONTROL], encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return {}
    if text != _said:
        _said, _num_writes = text, 0
    return dict(json.loads(text))


def concerns(target: Any, directory: str) -> bool:
    """`target`: a path or a descriptor."""
    path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
    return str(path).startswith(directory)


def faulty(call: Callable[..., Any], operation_of: Callable[..., str]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(target: Any, *args: Any, **kwargs: Any) -> Any:
        now = faults()
        if not now or not concerns(target, now["directory"]):
            return call(target, *args, **kwargs)
        operation = operation_of(*args, **kwargs)
        while operation in faults().get("hang", ()):
            time.sleep(0.02)
        if operation in now.get("fail", {}):
            number = getattr(errno, now["fail"][operation])
            with failures_file(os.environ[CONTROL]).open("ab") as failures:
                failures.write(b".")
            raise OSError(number, os.strerror(number))
        if call is _pwritev and "kill_at_write" in now:
            _die_in_time(now["kill_at_write"], target, *args)
        return call(target, *args, **kwargs)

    return wrapped


def _die_in_time(last: int, descriptor: int, pieces: Any, offset: int) -> None:
    global _num_writes
    _num_writes += 1
    if _num_writes >= last:
        data = b"".join(pieces)
        os.pwrite(descriptor, data[: len(data) // 2], offset)
        os.killpg(0, signal.SIGKILL)


def _operation_of_open(flags: int, *args: Any, **kwargs: Any) -> str:
    return "open" if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY) else ""


_pwritev = os.pwritev


def install() -> None:
    os.open = faulty(os.open, _operation_of_open)
    for name, operation in OPERATIONS.items():
        setattr(os, name, faulty(getattr(os, name), lambda *args, operation=operation, **kwargs: operation))
    disk_tier._LONGEST_RETRY_S = LONGEST_RETRY_S
    if patience_s := os.environ.get(PATIENCE):
        DiskTierSettings.__init__.__kwdefaults__["patience_s"] = float(patience_s)  # type: ignore[index, misc]
