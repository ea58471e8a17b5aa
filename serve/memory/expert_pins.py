"""Experts that a placement file pins to the device: the list's item `{gpu_experts: {LAYER: [EXPERT, ...]}}`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import yaml

from kt_runtime.documents import Entry, Values, shown
from kt_runtime.serve.options.named import Pins

PINS_KEY = "gpu_experts"
_EXPERT = re.compile(r"\.layers\.([0-9]+)\..*\.experts\.([0-9]+)$")


def read_pins(
    items: Iterable[yaml.Node], values: Values, problems: list[str], module_names: Sequence[str] | None
) -> tuple[Pins, list[yaml.Node]]:
    """(the pinned experts, the items that are rules). `module_names`: the model's modules; None: pins are not matched.

    Appends to `problems`, with file and line: more than one item, what is no layer or list of experts, an expert that
    is listed twice or that the model does not have.
    """
    pins: dict[int, tuple[int, ...]] = {}
    rules, places = [], list[str]()
    known = None if module_names is None else _experts_by_layer(module_names)
    for item in items:
        if not _is_pins(item):
            rules.append(item)
            continue
        places.append(values.where(item))
        if len(places) > 1:
            problems.append(f"{places[-1]}: {PINS_KEY} stands at {places[0]} already")
            continue
        try:
            parsed = values.value(item)
        except ValueError as error:
            problems.append(f"{places[-1]}: {error}")
            continue
        pins = _pins(parsed, problems, known)
    return pins, rules


def _is_pins(item: yaml.Node) -> bool:
    return isinstance(item, yaml.MappingNode) and any(key.value == PINS_KEY for key, _ in item.value)


def _pins(
    parsed: Sequence[Entry], problems: list[str], known: Mapping[int, set[int]] | None
) -> dict[int, tuple[int, ...]]:
    pins: dict[int, tuple[int, ...]] = {}
    for entry in parsed:
        if entry.key != PINS_KEY:
            problems.append(f"{entry.where}: {entry.key}: {PINS_KEY} is an item of its own")
        elif not isinstance(entry.value, tuple):
            problems.append(
                f"{entry.where}: {PINS_KEY}: {shown('', entry.value)}: must be a mapping of layers to experts"
            )
        else:
            for layer in entry.value:
                if (found := _layer(layer, problems, known)) is not None:
                    pins[found[0]] = found[1]
    return pins


def _layer(
    entry: Entry, problems: list[str], known: Mapping[int, set[int]] | None
) -> tuple[int, tuple[int, ...]] | None:
    """The layer and its experts; None if something is wrong with them."""
    wrong = _wrong_layer(entry, known) or _wrong_experts(entry, known)
    if wrong:
        problems.append(f"{entry.where}: {PINS_KEY}: {wrong}")
        return None
    return int(entry.key), tuple(entry.value)


def _wrong_layer(entry: Entry, known: Mapping[int, set[int]] | None) -> str:
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", entry.key):
        return f"{shown('', entry.key)} is no layer; allowed are whole numbers"
    if known is not None and int(entry.key) not in known:
        return f"layer {entry.key} has no routed experts; those that have: {_ranges(sorted(known))}"
    return ""


def _wrong_experts(entry: Entry, known: Mapping[int, set[int]] | None) -> str:
    experts = entry.value
    if not isinstance(experts, list) or not all(type(expert) is int and expert >= 0 for expert in experts):
        return f"layer {entry.key}: {shown('', experts)}: must be a list of experts, whole numbers from 0"
    seen: set[int] = set()
    for expert in experts:
        if expert in seen:
            return f"layer {entry.key}: expert {expert} is listed twice"
        if known is not None and expert not in known[int(entry.key)]:
            return f"layer {entry.key}: expert {expert}: allowed are {_ranges(sorted(known[int(entry.key)]))}"
        seen.add(expert)
    return ""


def _experts_by_layer(module_names: Sequence[str]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for match in filter(None, map(_EXPERT.search, module_names)):
        found.setdefault(int(match[1]), set()).add(int(match[2]))
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as text: 1 to 3, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in parts) or "none"
