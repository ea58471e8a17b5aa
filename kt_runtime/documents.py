"""Parses a recipe or placement file (YAML or JSON) into values that carry their line number.

This module uses PyYAML's `compose` instead of `load`: its nodes carry line numbers and keep duplicate keys. Plain
scalars then follow YAML 1.2's core rules, not PyYAML's 1.1: `1e-4` is a number, `010` and `no` are text (no octal, no
silent False). Only text, numbers, booleans, null, lists and mappings can result.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kt_runtime.errors import InvalidValueError, NotFoundError

LARGEST_BYTES = 1 << 20
SECRET_ENDINGS = ("token", "api_key", "secret", "password", "webhook_url")

_NULLS = {"", "~", "null", "Null", "NULL"}
_TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]{0,30})")
_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)?\.[0-9]+|(0|[1-9][0-9]*)\.?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_TAG + kind for kind in ("str", "int", "float", "bool", "null", "timestamp", "value", "seq", "map")}

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


@dataclass(frozen=True)
class Entry:
    """One `key: value`. `where` is file:line or "command line". A value that is a mapping is a tuple of entries."""

    key: str
    value: Any
    where: str


def shown(key: str, value: Any) -> str:
    """The value as an error message shows it: shortened, with secrets masked."""
    return "***" if is_secret(key) and value is not None else _short.repr(_masked(plain(value)))


def _masked(value: Any) -> Any:
    """Masks the secrets inside nested mappings too."""
    if isinstance(value, dict):
        return {key: "***" if is_secret(key) else _masked(inside) for key, inside in value.items()}
    return [_masked(inside) for inside in value] if isinstance(value, list) else value


def shown_key(key: str) -> str:
    return key if key.isprintable() and 0 < len(key) <= 80 else _short.repr(key)


def is_secret(key: str) -> bool:
    return key.casefold().endswith(SECRET_ENDINGS)


def plain(value: Any) -> Any:
    """The value without line numbers: mappings become dictionaries."""
    if isinstance(value, tuple):
        return {item.key: plain(item.value) for item in value}
    return [plain(item) for item in value] if isinstance(value, list) else value


def read_file(path: Path, kind: str) -> yaml.Node:
    """The file's one document. `kind` names the file in messages ("recipe").

    Raises NotFoundError for a missing file and InvalidValueError, with the line, for one that is not UTF-8 or not YAML.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such {kind}") from None
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > LARGEST_BYTES:
        raise InvalidValueError(f"{path}: is larger than {LARGEST_BYTES} bytes; a {kind} is a short text")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InvalidValueError(f"{path}:{line}: byte {raw[error.start]:#04x} is not UTF-8; save it as UTF-8") from None
    node = compose(_json_as_yaml(text, path) if path.suffix == ".json" else text, str(path))
    if node is None:
        raise InvalidValueError(f"{path}: is empty")
    return node


def compose(text: str, name: str) -> yaml.Node | None:
    """The root node of a YAML document, None if the document is empty. Raises InvalidValueError with the line."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise InvalidValueError(f"{name}:{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise InvalidValueError(f"{name}:{line}: not valid YAML: character {error.character:#06x}") from None
    except RecursionError:
        raise InvalidValueError(f"{name}: not valid YAML: nested too deeply") from None


def _json_as_yaml(text: str, path: Path) -> str:
    """Checks `text` as JSON and makes it valid YAML, line for line: YAML forbids JSON's tabs between values."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidValueError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from None
    except (RecursionError, ValueError) as error:
        raise InvalidValueError(f"{path}: not valid JSON: {error}") from None
    return text.replace("\t", " ")


def in_order(lines: list[str], path: Path) -> list[str]:
    """The messages sorted by line number; messages without a line, such as the command line's, come last."""

    def line(text: str) -> float:
        number = text.removeprefix(f"{path}:").partition(":")[0]
        return int(number) if text.startswith(f"{path}:") and number.isdecimal() else math.inf

    return sorted(lines, key=line)


class ProblemsError(InvalidValueError):
    """Several problems of one file. `problems`: one message each, with file and line."""

    def __init__(self, message: str, problems: list[str]) -> None:
        super().__init__(message)
        self.problems = problems


def all_problems(path: Path, problems: list[str]) -> ProblemsError:
    """One error that lists all problems of a file, by line."""
    count, ordered = len(problems), in_order(problems, path)
    lines = "\n".join(f"  {problem}" for problem in ordered)
    return ProblemsError(f"{path}: {count} problem{'s' * (count > 1)}\n{lines}", ordered)


class Values:
    """Converts YAML nodes to values; appends each problem to `problems`, with file and line.

    `name`: the file name for messages. `has_lines`: False for command-line text, which has a name but no lines.
    """

    def __init__(self, name: str, problems: list[str], *, has_lines: bool = True) -> None:
        self._name, self._problems, self._has_lines, self._seen = name, problems, has_lines, set[int]()

    def entries(self, node: yaml.MappingNode) -> list[Entry]:
        """A mapping's entries in order; duplicate keys and keys that are not text are problems."""
        entries: list[Entry] = []
        first: dict[str, str] = {}
        for key_node, value_node in node.value:
            where = self.where(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._problems.append(f"{where}: a key must be text, not a list or mapping")
                continue
            key = str(key_node.value)
            if key in first:
                self._problems.append(f"{where}: {shown_key(key)} stands at {first[key]} already")
                continue
            first[key] = where
            try:
                entries.append(Entry(key, self.value(value_node), where))
            except ValueError as error:
                self._problems.append(f"{where}: {shown_key(key)}: {error}")
        return entries

    def value(self, node: yaml.Node) -> Any:
        """The node's value. Raises ValueError for tags that create objects and aliases, which can expand endlessly."""
        if id(node) in self._seen:
            raise ValueError("an alias (*name) is not read here; write the value out")
        self._seen.add(id(node))
        if node.tag not in _PLAIN_TAGS:
            raise ValueError(f"the tag {_short.repr(node.tag)} is not allowed; only text, numbers, lists and mappings")
        if isinstance(node, yaml.MappingNode):
            return tuple(self.entries(node))
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item) for item in node.value]
        assert isinstance(node, yaml.ScalarNode)
        return _scalar(node.value) if node.style is None else _joined(node.value)

    def where(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}" if self._has_lines else self._name


def _joined(text: str) -> str:
    """Joins surrogate pairs. JSON escapes a character above U+FFFF as two surrogates (RFC 8259, section 7), and YAML's
    parser leaves the two separate. Raises ValueError for a lone surrogate: it is no character and can't be encoded."""
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise ValueError(f"{_short.repr(text)} has one half of a surrogate pair, which is no character") from None


def _scalar(text: str) -> Any:
    if text in _NULLS:
        return None
    if text in _TRUTHS:
        return _TRUTHS[text]
    if _WHOLE.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text
