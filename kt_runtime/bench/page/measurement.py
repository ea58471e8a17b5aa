"""One measurement: what was run, when and on what hardware, and its figures. docs/measurements/NAME.json holds one.

A figure keeps its digits: 0.80 in the file is 0.80 on the page.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from kt_runtime.errors import InvalidValueError
from kt_runtime.files import compact_json, errors_of_path, read_regular, write_file

MAX_FILE_BYTES = 4 << 20

_T = TypeVar("_T")

Text = Annotated[str, msgspec.Meta(min_length=1)]
Date = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]
Kind = Literal[
    "demo", "serving", "memory", "training", "rl", "interfere", "swap", "scale", "experts", "cache", "gpu", "tests"
]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Range(_Strict, frozen=True):
    """All values from `least` to `most` were seen."""

    least: Decimal
    most: Decimal

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"least {self.least} is above most {self.most}")


Figure = Decimal | Range | None
"""None: not measured."""
Cell = Decimal | Range | None | list[Figure]
"""One figure, the figures of several runs, or one figure for each unit of its column."""


class Column(_Strict, frozen=True):
    name: Text
    unit: Text | list[Text]


class Row(_Strict, frozen=True):
    """`case` has a text for each of the table's `case` columns, `figures` a cell for each of its `columns`."""

    case: list[Text]
    figures: list[Cell]
    note: Text | None = None


class Table(_Strict, frozen=True):
    """`name` is unique in its file: README.md refers to FILE#NAME."""

    name: Text
    case: list[Text]
    columns: list[Column]
    rows: list[Row]
    title: Text | None = None
    notes: list[Text] = []

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.case) != len(self.case) or len(row.figures) != len(self.columns):
                raise ValueError(
                    f"row {row.case}: {len(row.case)} texts and {len(row.figures)} figures; the table {self.name!r} "
                    f"has {len(self.case)} and {len(self.columns)} columns"
                )
            for column, cell in zip(self.columns, row.figures, strict=True):
                if cell is not None and isinstance(column.unit, list) and not _fits(cell, column.unit):
                    raise ValueError(
                        f"row {row.case}: column {column.name!r} needs one figure for each of {column.unit}"
                    )


class Single(_Strict, frozen=True):
    """A figure of its own."""

    what: Text
    value: Cell
    unit: Text
    note: Text | None = None


class Curve(_Strict, frozen=True):
    """`values`: at 1, 2, ... of the plot's horizontal axis."""

    name: Text
    values: Annotated[list[Decimal], msgspec.Meta(min_length=2)]


class Panel(_Strict, frozen=True):
    name: Text
    unit: Text
    curves: Annotated[list[Curve], msgspec.Meta(min_length=1, max_length=3)]


class Plot(_Strict, frozen=True):
    """A picture, docs/pictures/NAME.svg. `x`: what its horizontal axis counts. All panels have the same curves."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    title: Text
    x: Text
    panels: Annotated[list[Panel], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        names = [[curve.name for curve in panel.curves] for panel in self.panels]
        if any(each != names[0] for each in names):
            raise ValueError(f"plot {self.name!r}: its panels have different curves: {names}")


class Measurement(_Strict, frozen=True):
    """`machine`: a short name of the hardware. `why_unknown` has the reason for each of date, command and commit that
    is null. `notes`: what explains the figures; `misses`: what falls short of its aim."""

    title: Text
    kind: Kind
    date: Date | None
    machine: Text
    hardware: Text
    command: Text | None
    commit: Text | None
    why_unknown: dict[Literal["date", "command", "commit"], Text] = {}
    conditions: Text | None = None
    figures: list[Single] = []
    tables: list[Table] = []
    plots: list[Plot] = []
    notes: list[Text] = []
    misses: list[Text] = []

    def __post_init__(self) -> None:
        unknown = {name for name in ("date", "command", "commit") if getattr(self, name) is None}
        if unknown != set(self.why_unknown):
            raise ValueError(
                f"why_unknown has {sorted(self.why_unknown)}; null, and in need of a reason, are {sorted(unknown)}"
            )
        names = [table.name for table in self.tables]
        if len(names) != len(set(names)):
            raise ValueError(f"table names {names}: each must be unique in the file")


class PageFrame(_Strict, frozen=True):
    """What a page says around the measurements. `sections`: a heading for each kind that the page shows."""

    introduction: list[Text]
    sections: dict[Kind, Text]


class Frame(_Strict, frozen=True):
    """docs/measurements/page.json: what docs/measurements.md and docs/performance.md say. Each kind is on one of them.
    `not_measured` ends the first."""

    measurements: PageFrame
    performance: PageFrame
    not_measured: list[Text]

    def __post_init__(self) -> None:
        if twice := self.measurements.sections.keys() & self.performance.sections.keys():
            raise ValueError(f"{', '.join(sorted(twice))}: has a heading on both pages")


FRAME_FILE = "page.json"


def read_all(directory: Path) -> dict[str, Measurement]:
    """File name without suffix -> measurement, in the order of names. Raises InvalidValueError with file and field."""
    files = sorted(path for path in directory.glob("*.json") if path.name != FRAME_FILE)
    if not files:
        raise InvalidValueError(
            f"{directory}: holds no measurements (files NAME.json); name the checkout with --checkout"
        )
    return {path.stem: _decode(path, Measurement) for path in files}


def read_frame(directory: Path) -> Frame:
    return _decode(directory / FRAME_FILE, Frame)


def write(path: Path, measurement: Measurement) -> None:
    """Raises InvalidValueError, and writes nothing, if a field is not as the types above want it."""
    text = compact_json(msgspec.to_builtins(measurement, builtin_types=(Decimal,)))
    try:
        msgspec.json.decode(text, type=Measurement)  # constructors check no types
    except ValueError as error:
        raise InvalidValueError(f"{path}: {error}") from None
    with errors_of_path(path, "written"):
        write_file(path, (text + "\n").encode())


def _fits(cell: Cell, units: list[str]) -> bool:
    return isinstance(cell, list) and len(cell) == len(units)


def _decode(path: Path, kind: type[_T]) -> _T:
    with errors_of_path(path, "read"):
        try:
            return msgspec.json.decode(read_regular(path, MAX_FILE_BYTES), type=kind)
        except ValueError as error:  # also msgspec's: its message ends with the field's path
            raise InvalidValueError(f"{path}: {error}") from None
