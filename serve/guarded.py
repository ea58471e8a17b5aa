"""The frontend's side of its guard (`guard.py`): starts it, and shows it that the event loop runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from kt_runtime.serve import guard

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5


@contextlib.asynccontextmanager
async def guarded(
    *leftovers: Path, look_s: float = guard.LOOK_SECONDS, beat_s: float = BEAT_SECONDS
) -> AsyncIterator[None]:
    """Guards this process, whose event loop this is, until the block ends. Without a guard the block runs all the same.

    `leftovers`: files that the guard removes if this process dies in the block. The guard has no environment: a key
    that is in this process's does not get there.
    """
    command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(look_s), *map(str, leftovers)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={}, bufsize=0)
    except OSError as error:
        logger.warning("nobody will notice if this process hangs: its guard can't be started: %s", error)
        yield
        return
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    beating = asyncio.create_task(_beat(process.stdin, beat_s))
    try:
        yield
    finally:
        beating.cancel()
        process.kill()
        process.wait()
        process.stdin.close()


async def _beat(guard_input: IO[bytes], beat_s: float) -> None:
    """Ends with the guard. A full pipe is no error: the guard is stopped."""
    try:
        while True:
            guard_input.write(b".")
            await asyncio.sleep(beat_s)
    except BrokenPipeError:
        logger.warning("nobody will notice if this process hangs: its guard has ended")
