"""The trainer of one job: `kt-runtime train` in a process of its own, against this server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kt_runtime.serve.finetuning.recipe import RECIPE_FILE

OUTPUT_FILE = "trainer.log"
KEY_VARIABLE = "KT_RUNTIME_API_KEY"
MODULE, COMMANDS = "kt_runtime.serve.finetuning.launcher", "kt_runtime.cli.main"
POLL_SECONDS = 0.2
# A trainer ends after its step at the first SIGTERM, at once at the second, and by SIGKILL if it does not answer.
PAUSE_SECONDS, KILL_SECONDS = 1.0, 10.0
TOLD_CHARACTERS, READ_BYTES = 2000, 64 * 1024
PREFIX, HINT = "kt-runtime: ", "kt-runtime: `kt-runtime --debug"


@dataclass(frozen=True)
class Connection:
    """How a trainer reaches this server. `key`: one that the server has made for its trainers, None without keys."""

    url: str
    key: str | None = field(default=None, repr=False)


class Trainer:
    """A running process. `place`: the job's directory."""

    def __init__(self, place: Path, connection: Connection) -> None:
        """Raises OSError."""
        environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
        environment["PYTHONSAFEPATH"] = "1"
        if connection.key is not None:
            environment[KEY_VARIABLE] = connection.key
        train = ["-P", "-m", COMMANDS, "train", "--recipe", str(place / RECIPE_FILE), "--url", connection.url]
        self._output = place / OUTPUT_FILE
        descriptor = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self._process = _start(train, place, environment, descriptor)
        finally:
            os.close(descriptor)

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    async def stop(self) -> None:
        """Ends the process, without waiting for its step."""
        for number, wait_s in ((signal.SIGTERM, PAUSE_SECONDS), (signal.SIGTERM, KILL_SECONDS), (signal.SIGKILL, 60.0)):
            if self.status() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while self.status() is None:
                        await asyncio.sleep(POLL_SECONDS / 2)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def reason(self) -> str:
        """Why it has failed: what it said last, or the signal."""
        status = self.status()
        if status is not None and status < 0:
            return f"the trainer's process was ended by signal {-status} ({signal.Signals(-status).name})"
        with self._output.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        said = [line for line in lines if not line.startswith(HINT)]
        first = next((index for index, line in enumerate(said) if line.startswith(PREFIX)), max(0, len(said) - 3))
        text = "\n".join(said[first:]).removeprefix(PREFIX)
        return text[:TOLD_CHARACTERS] or f"the trainer ended with status {status}"


def _start(arguments: list[str], place: Path, environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """`arguments`: of the interpreter. `output`: the descriptor of what it says."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE, str(os.getpid()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=place,
        env=environment,
        start_new_session=True,  # Ctrl-C in the server's terminal is the server's
    )
