"""The form of a row before it becomes a conversation, for both formats, and checked access to a row's columns."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.data.catalog import DatasetInfo
from kt_runtime.train.data.conversations import Message
from kt_runtime.train.data.json_text import decode_line
from kt_runtime.train.data.rows import Row, shown

_NOT_LEARNT = {
    "images": "pictures are not learnt from",
    "videos": "videos are not learnt from",
    "audios": "sound is not learnt from",
    "kto_tag": "kto is not a stage of this version; write pairs of answers and use stage: dpo",
}


class RowSkipped(Exception):
    """The row is left out, and counted and named in the messages. The exception's message is the reason."""


@dataclass(frozen=True)
class Turns:
    """`messages`: all but the system's, the question included; `answers`: one, or the chosen and the rejected one.

    Of a question to be answered (reinforcement learning) the answer may be missing."""

    system: str
    messages: list[Message]
    answers: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None


class Cells:
    """A row's values by our names for its columns. A wrong type is an error that names place, column and value."""

    def __init__(self, row: Row, info: DatasetInfo) -> None:
        self._row, self._info, self.where = row, info, row.where
        for name, reason in _NOT_LEARNT.items():
            value = self.value(name)
            if value not in (None, "", [], [None]):
                raise self.error(name, f"{reason}; take the column out of the rows, or name columns without {name}")

    def column(self, name: str) -> str | None:
        """The row's own name of the column; None if it is unnamed."""
        return self._info.columns[name]

    def value(self, name: str) -> Any:
        """None for a column that is unnamed, missing or null."""
        column = self._info.columns[name]
        return None if column is None else self._row.values.get(column)

    def text(self, name: str) -> str:
        """The column's text; "" for null."""
        value = self.value(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.error(name, "must be text")
        return value

    def present(self, *names: str) -> None:
        """Raises if the row has none of these columns: then the file uses other column names."""
        columns = [column for name in names if (column := self._info.columns[name])]
        if any(column in self._row.values for column in columns):
            return
        near = difflib.get_close_matches(columns[0], list(self._row.values), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InvalidValueError(
            f"{self.where}: no column {' or '.join(repr(column) for column in columns)}; {hint}the row has "
            f"{', '.join(map(repr, list(self._row.values)[:10])) or 'none'}. Say columns in {self._info.where}"
        )

    def structure(self, name: str) -> Any:
        """The column's list or mapping, also as JSON text (csv has no other form)."""
        value = self.value(name)
        if isinstance(value, str):
            return decode_line(value, self._place(name)) if value.strip() else None
        return value

    def error(self, name: str, problem: str) -> InvalidValueError:
        return InvalidValueError(f"{self._place(name)}: {shown(self.value(name))}: {problem}")

    def _place(self, name: str) -> str:
        return f"{self.where}: {self._info.columns[name]}"


def read_tools(cells: Cells) -> tuple[dict[str, Any], ...] | None:
    """The functions that the row's assistant may call, in the form of chat templates; None without any."""
    tools = cells.structure("tools")
    if not tools:
        return None
    listed = [tools] if isinstance(tools, dict) else tools
    if not isinstance(listed, list):
        raise cells.error("tools", "must be a list of functions, as JSON or as JSON text")
    return tuple(_tool(tool, cells) for tool in listed)


def _tool(tool: Any, cells: Cells) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise cells.error("tools", "every function must be a mapping with a name")
    return {"type": "function", "function": function}


def read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Calls in the form of chat templates, with arguments as mappings.

    Accepts OpenAI's {"function": {"name", "arguments"}} and the plain {"name", "arguments"}, one or a list.
    """
    calls = [value] if isinstance(value, dict) else value
    if not isinstance(calls, list) or not calls:
        raise InvalidValueError(f"{where}: {shown(value)}: must be a call {{name, arguments}} or a list of calls")
    return [_call(call, where) for call in calls]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidValueError(f"{where}: {shown(call)}: a call must be a mapping with name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = decode_line(arguments, f"{where}: arguments of {function['name']}") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise InvalidValueError(f"{where}: arguments: {shown(arguments)}: must be a mapping, or one as JSON text")
    made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call is not function and isinstance(call.get("id"), str):
        made["id"] = call["id"]
    return made


def is_empty(message: Message) -> bool:
    return not message["content"].strip() and not message.get("tool_calls")
