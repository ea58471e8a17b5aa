"""A readable list of adapted modules: layers as ranges, projections side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = re.compile(r"(?P<before>.*?\blayers\.)(?P<layer>\d+)(?P<after>\..+)")


def patterns(modules: Iterable[str]) -> list[str]:
    """`model.layers.{0-26}.self_attn.{q_proj,o_proj}`: modules grouped by the layers in which they occur."""
    layers_of: dict[tuple[str, str, str], list[int]] = {}
    alone: list[str] = []
    for module in modules:
        if match := _LAYER.fullmatch(module):
            parent, _, projection = match["after"].rpartition(".")
            layers_of.setdefault((match["before"], parent, projection), []).append(int(match["layer"]))
        else:
            alone.append(module)
    projections_of: dict[tuple[str, str, str], list[str]] = {}
    for (before, parent, projection), layers in layers_of.items():
        projections_of.setdefault((before, ranges(layers), parent), []).append(projection)
    grouped = [
        f"{before}{_braced([layers])}{parent}.{_braced(projections)}"
        for (before, layers, parent), projections in projections_of.items()
    ]
    return grouped + alone


def ranges(numbers: Iterable[int]) -> str:
    """`0,2-5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _braced(names: list[str]) -> str:
    return names[0] if len(names) == 1 and not set(names[0]) & set("-,") else "{" + ",".join(names) + "}"
