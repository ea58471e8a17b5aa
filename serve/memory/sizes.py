"""Sizes in bytes as a user writes them: `512MiB`, `20G`, `1.5 TiB`, `1048576`."""

from __future__ import annotations

import re

from kt_runtime.errors import InvalidValueError, suggestion

# Binary units, also without the i, as in `free`, `du` and `systemd`.
UNITS = {"": 1, "B": 1} | {
    name: 1024**power for power, letter in enumerate("KMGT", start=1) for name in (letter, f"{letter}iB")
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(text: str, where: str) -> int:
    """The size in bytes. `where`: the option's name for messages. Raises InvalidValueError that lists allowed forms."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidValueError(f"{where} {text!r}: is no size; allowed are numbers with a unit, as 512MiB, 20G or 0")
    number, unit = match[1], match[2]
    names = {name.lower(): name for name in UNITS}
    if unit.lower() not in names:
        known = [name for name in UNITS if name]
        raise InvalidValueError(f"{where} {text!r}: unknown unit {unit!r}{suggestion(unit, known)}")
    factor = UNITS[names[unit.lower()]]
    return int(float(number) * factor) if "." in number else int(number) * factor
