"""What all commands of `bench` share: progress, and an end that leaves nothing behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from kt_runtime.cli.interrupts import Interruptible

Say = Callable[[str], None]


def measures(function: Callable[..., None]) -> Callable[..., None]:
    """A command that measures for long, and calls its argument `say` with each line of progress. Ctrl-C or SIGTERM ends
    its servers and peers, and removes its temporary files."""

    @functools.wraps(function)
    def wrapped(**options: Any) -> None:
        with Interruptible() as interruptible:

            def say(line: str) -> None:
                interruptible.check()
                click.echo(line, err=True)

            function(say=say, **options)

    return wrapped
