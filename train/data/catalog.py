"""`dataset_info.json`: the path and format of each dataset's rows, and the names of their columns and roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.errors import InvalidValueError, NotFoundError, UnknownNameError
from kt_runtime.train.data import json_text
from kt_runtime.train.data.rows import data_files, shown

INFO_FILE = "dataset_info.json"
FORMATS = ("alpaca", "openai", "sharegpt")

_CONTENT_COLUMNS = ("system", "tools", "history", "chosen", "rejected", "images", "videos", "audios", "kto_tag")
_COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "messages": "conversations",
    **{name: name for name in _CONTENT_COLUMNS},
}
_SHAREGPT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_OPENAI_TAGS = {
    **_SHAREGPT_TAGS,
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
}
_LOCAL = "download its files into dataset_dir and set file_name: THE_FILE_OR_FOLDER"
_ELSEWHERE = {
    "hf_hub_url": "hub datasets are not fetched; " + _LOCAL,
    "ms_hub_url": "hub datasets are not fetched; " + _LOCAL,
    "om_hub_url": "hub datasets are not fetched; " + _LOCAL,
    "script_url": "no code of a dataset is ever run; write its rows into a .jsonl file and set file_name: THE_FILE",
    "cloud_file_name": "cloud files are not fetched; " + _LOCAL,
}
_KEYS = (
    "file_name",
    "formatting",
    "ranking",
    "subset",
    "split",
    "folder",
    "num_samples",
    "columns",
    "tags",
    "file_sha1",
)


@dataclass(frozen=True)
class DatasetInfo:
    """One entry. `columns` and `tags` map our names to the row's own names, or to None where the row has none.

    `named_columns`: the entry has its own `columns`. Columns that it does not name are then not read.
    """

    name: str
    where: str
    path: Path
    formatting: str
    ranking: bool
    num_samples: int | None
    columns: Mapping[str, str | None]
    tags: Mapping[str, str | None]
    named_columns: bool


def read_catalog(
    directory: Path, names: tuple[str, ...], where: str, *, needs_answers: bool = True
) -> list[DatasetInfo]:
    """The entries of the named datasets. `where`: the origin of the names, for errors. `needs_answers`: an entry that
    names its columns must name the answer's.

    Raises NotFoundError, UnknownNameError for a name that is not in the file, and InvalidValueError.
    """
    if any(part == "ONLINE" or part.startswith("REMOTE:") for part in directory.parts) and not directory.exists():
        raise InvalidValueError(f"{where}: dataset_dir: {directory}: no dataset is fetched from a hub; {_LOCAL}")
    file = directory / INFO_FILE
    if not directory.is_dir():
        places = "" if directory.is_absolute() else f" in {Path.cwd()}, nor beside the recipe"
        raise NotFoundError(f"{where}: dataset_dir: {directory}: no such folder{places}; it should hold {INFO_FILE}")
    if not file.is_file():
        raise NotFoundError(f"{where}: dataset_dir: {directory}: holds no {INFO_FILE}")
    entries: dict[str, tuple[Any, int]] = {}
    for name, entry, line in json_text.members(json_text.read_text(file), file):
        if name in entries:
            raise InvalidValueError(f"{file}:{line}: dataset {name!r} is named twice, first in line {entries[name][1]}")
        entries[name] = (entry, line)
    for name in names:
        if name not in entries:
            raise UnknownNameError("dataset", name, entries, where=f"{where}: {file}")
    infos = [_read_entry(name, *entries[name], file) for name in names]
    for info in infos:
        _check_columns(info, needs_answers)
    return infos


def _read_entry(name: str, entry: Any, line: int, file: Path) -> DatasetInfo:
    where = f"{file}:{line}: {name}"
    _must(isinstance(entry, dict), where, entry, "a mapping with file_name")
    _check_keys(entry, where)
    formatting = entry.get("formatting") or "alpaca"
    if formatting not in FORMATS:
        raise UnknownNameError("formatting", str(formatting), FORMATS, where=where)
    ranking = entry.get("ranking") or False
    _must(isinstance(ranking, bool), f"{where}: ranking", ranking, "true or false")
    count = entry.get("num_samples")
    whole = count is None or (isinstance(count, int) and not isinstance(count, bool) and 1 <= count < 2**31)
    _must(whole, f"{where}: num_samples", count, "a whole number from 1 to 2147483647")
    return DatasetInfo(
        name=name,
        where=where,
        path=_path(entry, file.parent, where),
        formatting=formatting,
        ranking=ranking,
        num_samples=count,
        columns=_columns(entry, formatting, where),
        tags=_tags(entry, formatting, where),
        named_columns=entry.get("columns") is not None,
    )


def _check_keys(entry: dict[str, Any], where: str) -> None:
    for key in entry:
        if key in _ELSEWHERE:
            raise InvalidValueError(f"{where}: {key}: {shown(entry[key])}: {_ELSEWHERE[key]}")
        if key not in _KEYS:
            raise UnknownNameError("key", key, _KEYS, where=where)
    split = entry.get("split")
    if split not in (None, "train"):
        raise InvalidValueError(
            f"{where}: split: {shown(split)}: a local file has only the split train; "
            "name the split's own file in file_name, or take fewer rows with num_samples"
        )


def _path(entry: dict[str, Any], directory: Path, where: str) -> Path:
    for key in ("file_name", "folder", "subset"):
        value = entry.get(key)
        needed = key == "file_name"
        good = isinstance(value, str) and bool(value) if needed or value is not None else True
        _must(good, f"{where}: {key}", value, "the name of a file or folder in dataset_dir" if needed else "text")
    path = directory / (entry.get("folder") or "") / entry["file_name"]
    try:
        data_files(path)
    except NotFoundError as error:
        raise NotFoundError(f"{where}: file_name: {error}") from None
    return path


def _columns(entry: dict[str, Any], formatting: str, where: str) -> dict[str, str | None]:
    columns = entry.get("columns")
    if columns is None:
        return {**_COLUMNS, **({"messages": "messages"} if formatting == "openai" else {})}
    return {**dict.fromkeys(_COLUMNS), **_names(columns, "column", tuple(_COLUMNS), f"{where}: columns")}


def _tags(entry: dict[str, Any], formatting: str, where: str) -> dict[str, str | None]:
    """A tag that is not given keeps its default: without its tag, every row with that role would be lost."""
    defaults = _OPENAI_TAGS if formatting == "openai" else _SHAREGPT_TAGS
    tags = {**defaults, **_names(entry.get("tags") or {}, "tag", tuple(defaults), f"{where}: tags")}
    roles = [key for key in tags if key not in ("role_tag", "content_tag") and tags[key] is not None]
    for index, key in enumerate(roles):
        for other in roles[:index]:
            if tags[key] == tags[other]:
                raise InvalidValueError(f"{where}: tags: {other} and {key} are both {tags[key]!r}; they must differ")
    for key in ("role_tag", "content_tag", "user_tag", "assistant_tag"):
        _must(tags[key] is not None, f"{where}: tags: {key}", None, "text")
    return tags


def _names(value: Any, kind: str, known: tuple[str, ...], where: str) -> dict[str, str | None]:
    _must(isinstance(value, dict), where, value, f"a mapping of our {kind} names to the file's")
    for key, name in value.items():
        if key not in known:
            raise UnknownNameError(kind, key, known, where=where)
        _must(name is None or (isinstance(name, str) and name != ""), f"{where}: {key}", name, f"a {kind}'s name")
    return value


def _check_columns(info: DatasetInfo, needs_answers: bool) -> None:
    """Requires the columns that every row needs. As in LLaMA-Factory, a column that `columns` leaves out is null."""
    chat = info.formatting != "alpaca"
    needed: list[tuple[str, ...]] = [("messages",)] if chat else [("prompt", "query")]
    needed += [("chosen",), ("rejected",)] if info.ranking else [("response",)] if needs_answers and not chat else []
    for names in needed:
        if not any(info.columns[name] for name in names):
            raise InvalidValueError(
                f"{info.where}: columns: does not name {' or '.join(names)}; where columns is given, every column that "
                "it does not name is not read"
            )


def _must(good: bool, where: str, value: Any, allowed: str) -> None:
    if not good:
        raise InvalidValueError(f"{where}: {shown(value)}: must be {allowed}")
