"""Reads datasets as LLaMA-Factory names them: `dataset_info.json` beside json(l) files, alpaca or OpenAI messages.

A row becomes a conversation: a list of {"role", "content"} messages whose assistant turns are what is trained on.
Every error names file and line (jsonl) or file and row (json).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.errors import InvalidValueError, NotFoundError, UnknownNameError

INFO_FILE = "dataset_info.json"
_INFO_KEYS = {"file_name", "formatting", "num_samples"}
_ALPACA_KEYS = {"instruction", "input", "output", "system", "history"}
_ROLES = {"system", "user", "assistant"}

Message = dict[str, str]


@dataclass(frozen=True)
class Conversation:
    """`where` is the row's place, for messages. The last message is the assistant's."""

    messages: tuple[Message, ...]
    where: str


def read_datasets(directory: Path, names: tuple[str, ...], max_samples: int | None = None) -> list[Conversation]:
    """The named datasets one after the other, at most `max_samples` rows of each.

    Raises NotFoundError, UnknownNameError for a dataset that `dataset_info.json` does not name, and InvalidValueError
    for a row that is not what its format says.
    """
    info_path = directory / INFO_FILE
    if not info_path.is_file():
        raise NotFoundError(f"{info_path}: not found; a dataset directory holds {INFO_FILE} (dataset_dir: {directory})")
    info = _json(info_path.read_bytes(), str(info_path))
    if not isinstance(info, dict):
        raise InvalidValueError(f"{info_path}: must be a mapping of dataset names")
    conversations: list[Conversation] = []
    for name in names:
        if name not in info:
            raise UnknownNameError("dataset", name, info, where=str(info_path))
        conversations += _read_dataset(directory, name, info[name], info_path, max_samples)
    return conversations


def _read_dataset(
    directory: Path, name: str, description: Any, info_path: Path, max_samples: int | None
) -> list[Conversation]:
    where = f"{info_path}: {name}"
    if not isinstance(description, dict) or not isinstance(description.get("file_name"), str):
        raise InvalidValueError(f"{where}: must name a file_name; hub and script datasets are not read by this version")
    unknown = sorted(set(description) - _INFO_KEYS)
    if unknown:
        raise InvalidValueError(f"{where}: {unknown[0]} is not honoured by this version; {sorted(_INFO_KEYS)} are")
    formatting = description.get("formatting", "alpaca")
    if formatting not in _FORMATS:
        raise UnknownNameError("dataset formatting", str(formatting), _FORMATS, where=where)
    limits = [limit for limit in (max_samples, description.get("num_samples")) if limit is not None]
    rows: list[Conversation] = []
    for row, place in _rows(directory / description["file_name"]):
        if limits and len(rows) >= min(limits):
            break
        if not isinstance(row, dict):
            raise InvalidValueError(f"{place}: a row must be a mapping, this is {type(row).__name__}")
        rows.append(Conversation(tuple(_FORMATS[formatting](row, place)), place))
    if not rows:
        raise InvalidValueError(f"{where}: {description['file_name']} holds no rows")
    return rows


def _rows(path: Path) -> Iterator[tuple[Any, str]]:
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file")
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _json(line, f"{path}:{number}", line_offset=None), f"{path}:{number}"
    elif path.suffix == ".json":
        rows = _json(path.read_bytes(), str(path))
        if not isinstance(rows, list):
            raise InvalidValueError(f"{path}: must be a list of rows")
        for index, row in enumerate(rows):
            yield row, f"{path}: row {index + 1}"
    else:
        raise InvalidValueError(f"{path}: this version reads .json and .jsonl files")


def _json(data: bytes, where: str, line_offset: int | None = 0) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"{where}: byte {data[error.start]:#04x} is not UTF-8") from None
    except json.JSONDecodeError as error:
        place = where if line_offset is None else f"{where}:{error.lineno + line_offset}"
        raise InvalidValueError(f"{place}: not valid JSON: {error.msg} (column {error.colno})") from None


def _string(row: dict[str, Any], key: str, place: str, *, required: bool = False) -> str:
    value = row.get(key)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or (required and not value):
        raise InvalidValueError(f"{place}: {key}: {value!r}: must be {'non-empty ' * required}text")
    return value


def _alpaca(row: dict[str, Any], place: str) -> list[Message]:
    unknown = sorted(set(row) - _ALPACA_KEYS)
    if unknown:
        raise InvalidValueError(f"{place}: unknown column {unknown[0]!r}; alpaca rows have {sorted(_ALPACA_KEYS)}")
    messages: list[Message] = []
    if system := _string(row, "system", place):
        messages.append({"role": "system", "content": system})
    for turn in row.get("history") or []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise InvalidValueError(f"{place}: history: must be a list of [question, answer] pairs")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = "\n".join(
        filter(None, (_string(row, "instruction", place, required=True), _string(row, "input", place)))
    )
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _string(row, "output", place, required=True)})
    return messages


def _openai(row: dict[str, Any], place: str) -> list[Message]:
    turns = row.get("messages")
    if not isinstance(turns, list) or not turns:
        raise InvalidValueError(f"{place}: messages: must be a non-empty list")
    messages: list[Message] = []
    for turn in turns:
        if not isinstance(turn, dict) or turn.get("role") not in _ROLES:
            raise InvalidValueError(f"{place}: messages: every message needs a role of {sorted(_ROLES)}: {turn!r}")
        messages.append({"role": turn["role"], "content": _string(turn, "content", place, required=True)})
    if messages[-1]["role"] != "assistant":
        raise InvalidValueError(f"{place}: messages: the last one must be the assistant's; there is nothing to learn")
    return messages


_FORMATS: dict[str, Callable[[dict[str, Any], str], list[Message]]] = {"alpaca": _alpaca, "openai": _openai}
