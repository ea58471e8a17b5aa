"""The terminal of `kt-runtime serve`: kt-runtime's own lines, warnings and errors. A log file has the full output."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from kt_runtime.serve.console.log_file import LogFile
from kt_runtime.serve.console.records import LogReader, logging_config, printable

CONFIG_VARIABLE = "SGLANG_LOGGING_CONFIG_PATH"
POLL_SECONDS = 0.1
TAIL_LINES = 30


class Console:
    """Prints each line through `say`. With a `log`, a thread reads the log and prints the lines meant for the user.

    `configuration`: the file with SGLang's logging configuration, deleted when the console ends.
    """

    def __init__(
        self, say: Callable[[str], None], log: LogFile | None = None, configuration: Path | None = None
    ) -> None:
        self._say, self._log, self._configuration = say, log, configuration
        self._reader = LogReader()
        self._started_s = time.monotonic()
        self._lock = threading.Lock()  # guards the reader and the order of lines
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="console", daemon=True)

    @property
    def seconds(self) -> float:
        """Seconds since the console was opened."""
        return time.monotonic() - self._started_s

    def say(self, line: str) -> None:
        """Prints `line`. A closed terminal, or a pipe whose reader has ended, does not end the server."""
        with contextlib.suppress(OSError, ValueError):
            self._say(line)

    def start(self) -> None:
        if self._log is None:
            return
        self.say(f"the full log is {self._log.path}")
        if self._configuration is not None:
            os.environ[CONFIG_VARIABLE] = str(self._configuration)
        self._log.redirect()
        self._thread.start()

    def show_tail(self) -> None:
        """Prints the end of the log after a crash, including lines that were already printed."""
        if self._log is None:
            return
        with self._lock:
            self._log.new_lines()
            self.say(f"the end of {self._log.path}:")
            for line in self._log.tail(TAIL_LINES):
                self.say(f"  | {printable(line)}")

    def end(self) -> None:
        """Prints the remaining lines and restores stdout and stderr. May be called more than once."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        if self._log is not None:
            self._log.restore()
        if self._configuration is not None:
            os.environ.pop(CONFIG_VARIABLE, None)
            self._configuration.unlink(missing_ok=True)

    def _follow(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self._show_new()
        self._show_new()

    def _show_new(self) -> None:
        assert self._log is not None
        with self._lock:
            for line in self._log.new_lines():
                if (shown := self._reader.shown(line)) is not None:
                    self.say(shown)


def terminal() -> TextIO:
    """A duplicate of stdout: once SGLang runs, file descriptor 1 is the log. /dev/null for a process without stdout."""
    try:
        return os.fdopen(os.dup(1), "w")
    except OSError:
        return open(os.devnull, "w")


@contextlib.contextmanager
def opened_console(
    say: Callable[[str], None], directory: Path, name: str | int, log_level: str, *, verbose: bool
) -> Iterator[Console]:
    """The console of the server `name`, its port; the log and SGLang's logging configuration are in `directory`.

    `verbose`: all output of the processes goes to the terminal and there is no log file. The same holds when the user
    configures SGLang's logging. When the server fails, the end of the log is shown.
    """
    if verbose or os.environ.get(CONFIG_VARIABLE):
        yield Console(say)
        return
    configuration = directory / f"serve-{name}.logging.json"
    configuration.write_text(json.dumps(logging_config(log_level)))
    console = Console(say, LogFile(directory / f"serve-{name}.log"), configuration)
    console.start()
    try:
        yield console
    except Exception:
        console.show_tail()
        raise
    finally:
        console.end()
