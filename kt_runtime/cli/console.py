"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console


def console_of_width(columns: int) -> Console:
    """The terminal as it is; a file or a pipe gets at least so many columns, so that a table's words stay whole."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, columns))
