"""Options that the user passes on to SGLang, as written on the command line."""

from __future__ import annotations

from collections.abc import Sequence


def last_value(arguments: Sequence[str], option: str) -> str | None:
    """The last value given to an option."""
    found = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option:
            found = value if equals else "".join(arguments[position + 1 : position + 2])
    return found
