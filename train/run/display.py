"""A run's output: lines, and a progress bar at the bottom of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import IO, Any, Protocol


class Display(Protocol):
    """An output for lines (`say`) and for the run's progress (`progress`); a context manager."""

    def say(self, line: str) -> None: ...

    def progress(self, done: int, total: int, facts: Mapping[str, str]) -> None:
        """`facts`: shown next to the bar in this order, as {"loss": "0.1234", "left": "0:01:10"}."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *_: object) -> None: ...


class PlainDisplay:
    """Lines only, for pipes and log files, where the journal's lines show the progress."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.say = write

    def progress(self, done: int, total: int, facts: Mapping[str, str]) -> None:
        pass

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class TerminalDisplay:
    """A bar at the bottom while lines scroll above it, drawn from the first `progress` on."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = Console(file=stream)
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
        self._bar = Progress(*columns, console=self._console, auto_refresh=False)
        self._task: Any = None

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def progress(self, done: int, total: int, facts: Mapping[str, str]) -> None:
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("training", total=total, facts="")
        text = "  ".join(f"{name} {value}" for name, value in facts.items())
        self._bar.update(self._task, completed=done, total=total, facts=text, refresh=True)

    def __enter__(self) -> TerminalDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def display_for(stream: IO[str]) -> Display:
    """A bar if `stream` is a terminal, else plain lines, each written at once."""
    if stream.isatty():
        return TerminalDisplay(stream)

    def write(line: str) -> None:
        stream.write(line + "\n")
        stream.flush()

    return PlainDisplay(write)
