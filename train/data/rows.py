"""The rows of a dataset's file or folder, one at a time, each a mapping with its file:line.

json and jsonl are read by `json_text`, since no library reports the line of an error; csv by the standard library;
parquet and arrow by pyarrow, one batch at a time.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.errors import InvalidValueError, NotFoundError, UserError
from kt_runtime.train.data import json_text, tables

Report = Callable[[UserError], None]
"""Gets a problem; raises it, or keeps it so that reading continues to further ones."""

_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


@dataclass(frozen=True, slots=True)
class Row:
    """`where` is file:line; for a table, which has no lines, "file: row N"."""

    values: dict[str, Any]
    where: str


def refuse(error: UserError) -> None:
    """The default `Report`: raises the first problem."""
    raise error


def read_rows(path: Path, columns: Collection[str], report: Report = refuse) -> Iterator[Row]:
    """Rows of a file, or of all files of a folder in the order of their names.

    `columns`: the columns that the caller needs; others of a table are not read. `report` gets the problem of a single
    row; reading continues without that row. Raises NotFoundError, and InvalidValueError for a file that is empty or
    does not match its suffix.
    """
    for file in data_files(path):
        for values, where in _read_file(file, columns, report):
            if isinstance(values, dict):
                yield Row(values, where)
                continue
            kind = type(values).__name__
            report(InvalidValueError(f"{where}: a row must be a mapping of columns, this is {kind}: {shown(values)}"))


def data_files(path: Path) -> list[Path]:
    """The file itself, or the files of a folder, which must have one type; names with a leading dot are ignored."""
    if not path.is_dir():
        files = [path]
        if not path.is_file():
            raise NotFoundError(f"{path}: no such file or folder")
    else:
        files = sorted(entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith("."))
        if not files:
            raise InvalidValueError(f"{path}: the folder holds no files")
    for file in files:
        _check_suffix(file)
    types = {"json" if file.suffix == ".jsonl" else file.suffix.lower()[1:]: file for file in files}
    if len(types) > 1:
        one, other = list(types.values())[:2]
        raise InvalidValueError(f"{path}: a folder must hold files of one type; {one.name} and {other.name} differ")
    return files


def shown(value: Any) -> str:
    """The value for a message, at most 80 characters."""
    try:
        text = repr(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= 80 else text[:77] + "..."


def _check_suffix(file: Path) -> None:
    suffix = file.suffix.lower()
    if suffix == ".txt":
        raise InvalidValueError(
            f"{file}: .txt holds text without questions and answers, which only pretraining (stage: pt) uses; "
            f"write rows with an answer into one of {', '.join(_SUFFIXES)}"
        )
    if suffix not in _SUFFIXES:
        raise InvalidValueError(f"{file}: suffix {file.suffix!r}: datasets are read from {', '.join(_SUFFIXES)}")


def _read_file(file: Path, columns: Collection[str], report: Report) -> Iterator[tuple[Any, str]]:
    suffix = file.suffix.lower()
    if suffix == ".csv":
        return _csv_rows(file)
    if suffix in (".parquet", ".arrow"):
        return tables.rows(file, columns)
    if suffix == ".json" or _begins_with_bracket(file):
        return ((row, f"{file}:{line}") for row, line in json_text.rows_of_text(json_text.read_text(file), file))
    return _json_lines(file, report)


def _json_lines(file: Path, report: Report) -> Iterator[tuple[Any, str]]:
    for text, where in _filled_lines(file):
        try:
            yield json_text.decode_line(text, where), where
        except InvalidValueError as error:
            report(error)


def _filled_lines(file: Path) -> Iterator[tuple[str, str]]:
    """(line, file:line) of each line that is not blank."""
    for number, text in _lines(file):
        if not text.isspace():
            yield text.rstrip("\r\n"), f"{file}:{number}"


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """(number, line with its end). Raises InvalidValueError for invalid UTF-8 and for an empty file."""
    filled = False
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise json_text.not_utf8(f"{file}:{number}", error) from None
            filled = filled or bool(text.strip())
            yield number, text or "\n"
    if not filled:
        raise InvalidValueError(f"{file}:1: the file is empty")


def _open(file: Path) -> Any:
    try:
        return file.open("rb")
    except OSError as error:
        raise NotFoundError(f"{file}: cannot be read: {error.strerror}") from None


def _begins_with_bracket(file: Path) -> bool:
    """Whether a .jsonl file is really one JSON array, as some tools write it."""
    with _open(file) as stream:
        return stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _csv_rows(file: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Rows with the names of the first line. A row's place is its first line: cells may contain line ends."""
    csv.field_size_limit(2**31 - 1)  # an answer may exceed the default, 131,072 characters
    reader = csv.reader((text for _, text in _lines(file)), strict=True)
    header: list[str] = []
    begin = 1
    try:
        for cells in reader:
            where, begin = f"{file}:{begin}", reader.line_num + 1
            if not cells:
                continue
            if not header:
                header = _header(cells, where)
            elif len(cells) != len(header):
                raise InvalidValueError(f"{where}: {len(cells)} cells, but the first line names {len(header)} columns")
            else:
                yield dict(zip(header, cells, strict=True)), where
    except csv.Error as error:
        raise InvalidValueError(f"{file}:{reader.line_num}: not valid CSV: {error}") from None


def _header(cells: list[str], where: str) -> list[str]:
    repeated = [name for name in cells if cells.count(name) > 1]
    if repeated:
        raise InvalidValueError(f"{where}: column {repeated[0]!r} is named twice")
    return cells
