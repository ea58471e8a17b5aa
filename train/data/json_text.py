"""JSON with line numbers: rows of an array or of a stream of objects, one at a time, each with its line.

The file's text is kept in memory, the rows are not: `raw_decode` parses one value at a time from the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from kt_runtime.errors import InvalidValueError, NotFoundError

_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def read_text(path: Path) -> str:
    """The file as text, without its byte order mark. An error for invalid UTF-8 names the line of the byte."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise not_utf8(f"{path}:{line}", error) from None
    if not text.strip():
        raise InvalidValueError(f"{path}:1: the file is empty")
    return text


def not_utf8(where: str, error: UnicodeDecodeError) -> InvalidValueError:
    byte = error.object[error.start]
    return InvalidValueError(f"{where}: byte {byte:#04x} is not UTF-8; save the file as UTF-8")


def decode_line(text: str, where: str) -> Any:
    """The single JSON value in `text`. `where` is its file:line."""
    value, end = _decode(text, _skip(text, 0), where)
    end = _skip(text, end)
    if end != len(text):
        raise InvalidValueError(f"{where}: not valid JSON: something follows the value (column {end + 1})")
    return value


def rows_of_text(text: str, path: Path) -> Iterator[tuple[Any, int]]:
    """(row, line) of each row: the elements of an array, or consecutive objects."""
    start = _skip(text, 0)
    return _elements(text, start + 1, path) if text[start] == "[" else _stream(text, start, path)


def members(text: str, path: Path) -> Iterator[tuple[str, Any, int]]:
    """(key, value, line) of each member of the text's one object, duplicate keys included."""
    cursor = _Cursor(text, path)
    cursor.expect("{")
    while not cursor.took("}"):
        key = cursor.value()
        if not isinstance(key, str):
            cursor.fail("a key must be text")
        line = cursor.line
        cursor.expect(":")
        yield key, cursor.value(), line
        if not cursor.took(","):
            cursor.expect("}")
            break
    cursor.expect_end()


def _elements(text: str, start: int, path: Path) -> Iterator[tuple[Any, int]]:
    cursor = _Cursor(text, path, start)
    if not cursor.took("]"):
        while True:
            value = cursor.value()
            yield value, cursor.line
            if not cursor.took(","):
                break
        cursor.expect("]")
    cursor.expect_end()


def _stream(text: str, start: int, path: Path) -> Iterator[tuple[Any, int]]:
    cursor = _Cursor(text, path, start)
    while not cursor.at_end():
        value = cursor.value()
        yield value, cursor.line


class _Cursor:
    """A position in a text. `line` is the first line of the last value that was read."""

    def __init__(self, text: str, path: Path, position: int = 0) -> None:
        self._text, self._path, self._position = text, path, position
        self._counted, self.line = 0, 1

    def value(self) -> Any:
        self._position = _skip(self._text, self._position)
        self.line += self._text.count("\n", self._counted, self._position)
        self._counted = self._position
        value, self._position = _decode(self._text, self._position, str(self._path), whole_file=True)
        return value

    def took(self, sign: str) -> bool:
        self._position = _skip(self._text, self._position)
        found = self._text.startswith(sign, self._position)
        self._position += found
        return found

    def expect(self, sign: str) -> None:
        if not self.took(sign):
            self.fail(f"expected {sign!r}")

    def at_end(self) -> bool:
        self._position = _skip(self._text, self._position)
        return self._position == len(self._text)

    def expect_end(self) -> None:
        if not self.at_end():
            self.fail("something follows the end of the data")

    def fail(self, problem: str) -> NoReturn:
        raise _invalid(json.JSONDecodeError(problem, self._text, self._position), str(self._path), whole_file=True)


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match
    return match.end()


def _decode(text: str, position: int, where: str, *, whole_file: bool = False) -> tuple[Any, int]:
    try:
        value, end = _DECODER.raw_decode(text, position)
        if _SURROGATE.search(text, position, end):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _invalid(error, where, whole_file) from None
    except UnicodeEncodeError as error:
        problem = f"\\u{ord(error.object[error.start]):04x} is half a character"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError as error:  # NaN, Infinity, a number of thousands of digits
        problem = str(error).split(";")[0]
    else:
        return value, end
    line = text.count("\n", 0, position) + 1
    place = f"{where}:{line}" if whole_file else where
    raise InvalidValueError(f"{place}: not valid JSON: {problem}")


def _invalid(error: json.JSONDecodeError, where: str, whole_file: bool) -> InvalidValueError:
    place = f"{where}:{error.lineno}" if whole_file else where
    return InvalidValueError(f"{place}: not valid JSON: {error.msg} (column {error.colno})")
