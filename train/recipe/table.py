"""Every known key with its class: honoured, alias, refused, warned. docs/recipes.md is this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kt_runtime.train.recipe import kt_config
from kt_runtime.train.recipe.checks import Check
from kt_runtime.train.recipe.fields import DEFAULTS, HONOURED
from kt_runtime.train.recipe.others import REFUSED, TABLE, WARNED

CHECKS: Mapping[str, Check] = {
    **{name: field.metadata["check"] for name, field in HONOURED.items()},
    **{name: alias.check for name, alias in TABLE.aliases.items()},
}
KNOWN = (*HONOURED, *TABLE.aliases, *REFUSED, *WARNED)


@dataclass(frozen=True)
class Row:
    """One line of docs/recipes.md. `kind`: honoured, alias, refused or warned."""

    key: str
    kind: str
    default: str
    line: str


def rows() -> list[Row]:
    """All keys in the order of the documentation: by class, then as declared."""
    table = [_honoured(name) for name in HONOURED]
    table += [Row(name, "alias", "", alias.line) for name, alias in TABLE.aliases.items()]
    table += [
        Row(name, "refused", " or ".join(map(_word, dict.fromkeys(known.passing))), str(known.reason))
        for name, known in REFUSED.items()
    ]
    table += [
        Row(name, "warned", _word(known.default), known.reason or "no effect here; no line is printed")
        for name, known in WARNED.items()
    ]
    table += [
        Row(f"kt_config.{name}", known.kind, "", kt_config.line(known)) for name, known in kt_config.FIELDS.items()
    ]
    return table


def _honoured(name: str) -> Row:
    metadata = HONOURED[name].metadata
    return Row(name, "alias" if metadata["alias"] else "honoured", _word(DEFAULTS[name]), metadata["line"])


def _word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return str(value) if value not in ("", {}) else "none"


_TITLES = {
    "honoured": ("Honoured", "the same effect as in LLaMA-Factory", "default"),
    "alias": ("Aliases", "another name of a key, or compared with the resident model", "default"),
    "refused": ("Refused", "training would not do what the recipe says; accepted when off", "off"),
    "warned": ("Without effect", "the result is the same; one line gives the reason", "accepted silently"),
}


def markdown() -> str:
    """The tables of docs/recipes.md."""
    lines: list[str] = []
    for kind, (title, meaning, column) in _TITLES.items():
        lines += [f"## {title}: {meaning}", "", f"| key | {column} | |", "|---|---|---|"]
        lines += [f"| `{row.key}` | {row.default} | {row.line} |" for row in rows() if row.kind == kind]
        lines.append("")
    return "\n".join(lines)
