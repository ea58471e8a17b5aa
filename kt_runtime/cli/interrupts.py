"""SIGINT and SIGTERM end a command with one KeyboardInterrupt, which neither cuts a cleanup short nor gets lost; the
decorator of commands that take long and print their progress.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import Any

import click

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Say = Callable[[str], None]


class Interruptible:
    """A context for a whole command, entered in the main thread. The first of `SIGNALS` raises KeyboardInterrupt there;
    further ones do nothing, so that they do not interrupt the cleanup.

    After a signal the block ends with KeyboardInterrupt, whatever it raised or returned: pybind11 turns the exception
    into ImportError while a module is imported, Python drops it in destructors and in callbacks of weak references, and
    a client whose server ends meets broken connections. Of the dropped ones nothing is printed.
    """

    def __init__(self) -> None:
        self._has_arrived = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruptible:
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN:  # as a shell starts background jobs
                self._previous[number] = handler
                signal.signal(number, self._on_signal)
        self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._on_dropped_exception
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            # After a signal the process is about to end, with the status of the first one.
            signal.signal(number, signal.SIG_IGN if self._has_arrived else handler)
        sys.unraisablehook = self._previous_hook
        if self._has_arrived and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal has arrived."""
        if self._has_arrived:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._has_arrived:
            self._has_arrived = True
            raise KeyboardInterrupt

    def _on_dropped_exception(self, dropped: sys.UnraisableHookArgs) -> None:
        if not (self._has_arrived and issubclass(dropped.exc_type, KeyboardInterrupt)):
            self._previous_hook(dropped)


def with_progress(function: Callable[..., None]) -> Callable[..., None]:
    """A command that takes long, and calls its argument `say` with each line of progress. Ctrl-C or SIGTERM ends its
    servers and peers, and removes its temporary files."""

    @functools.wraps(function)
    def wrapped(**options: Any) -> None:
        with Interruptible() as interruptible:

            def say(line: str) -> None:
                interruptible.check()
                click.echo(line, err=True)

            function(say=say, **options)

    return wrapped


@contextlib.contextmanager
def uninterrupted() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """In the block `SIGNALS` wait until its end, so that what the block begins it also ends.

    Yields a function that makes a context, for use within the block, in which signals act as before the block:

        with uninterrupted() as acting:
            begun = begin()
            try:
                with acting():
                    use(begun)
            finally:
                begun.end()

    Does nothing in other threads than the main thread, which alone runs handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield nullcontext
        return
    waiting: list[int] = []
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not None}

    def wait() -> None:
        for number in before:
            signal.signal(number, lambda arrived, _: waiting.append(arrived))

    def act() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        while waiting:
            signal.raise_signal(waiting.pop())

    @contextlib.contextmanager
    def acting() -> Iterator[None]:
        try:
            act()
            yield
        finally:
            wait()

    try:
        wait()
        yield acting
    finally:
        act()
