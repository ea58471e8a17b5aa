"""Sharegpt and OpenAI rows: a list of turns, each with its role. The dataset's tags define the names of the roles.

Questions (user, tool) and answers (assistant, its tool calls) must alternate. As in LLaMA-Factory, rows in another
order or with another role are left out. In OpenAI rows, consecutive tool turns count as one.
"""

from __future__ import annotations

import re
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.data.catalog import DatasetInfo
from kt_runtime.train.data.conversations import Message
from kt_runtime.train.data.json_text import decode_line
from kt_runtime.train.data.rows import Row, shown
from kt_runtime.train.data.turns import Cells, RowSkipped, Turns, read_calls, read_tools

_ROLES = {"user_tag": "user", "observation_tag": "tool", "assistant_tag": "assistant", "function_tag": "assistant"}
_KEPT = ("tool_call_id", "name", "reasoning_content")  # read by the chat templates of some models
_THOUGHT = re.compile(r"\s*(<think>.*?</think>)\s*", re.DOTALL)


def read_turns(row: Row, info: DatasetInfo) -> Turns:
    """Raises RowSkipped for wrong roles or a wrong order, InvalidValueError for a value of the wrong type."""
    cells, system, turns = _opened(row, info)
    _check_order(turns, info)
    _check_end(turns, info)
    messages = [turn.message() for turn in turns]
    if info.ranking:
        answers = tuple(_answer(cells, name, info) for name in ("chosen", "rejected"))
    else:
        answers = (messages.pop(),)
    return Turns(system=system, messages=messages, answers=answers, tools=read_tools(cells))


def read_question(row: Row, info: DatasetInfo) -> Turns:
    """As `read_turns`, where the last turn may be a question: `answers` has one message or none."""
    cells, system, turns = _opened(row, info)
    _check_order(turns, info)
    messages = [turn.message() for turn in turns]
    answers = (messages.pop(),) if turns[-1].answers else ()
    return Turns(system=system, messages=messages, answers=answers, tools=read_tools(cells))


def _opened(row: Row, info: DatasetInfo) -> tuple[Cells, str, list[_Turn]]:
    """(the row's cells, the system prompt, the turns without it)."""
    cells = Cells(row, info)
    cells.present("messages")
    given = cells.structure("messages")
    if not isinstance(given, list):
        raise cells.error("messages", "must be a list of turns")
    turns = [_Turn(turn, f"{row.where}: {info.columns['messages']}: turn {i}", info) for i, turn in enumerate(given, 1)]
    system = cells.text("system")
    if turns and turns[0].tag == info.tags["system_tag"]:
        system = turns.pop(0).text() or system
    return cells, system, turns


class _Turn:
    def __init__(self, values: Any, where: str, info: DatasetInfo) -> None:
        if not isinstance(values, dict):
            raise InvalidValueError(f"{where}: {shown(values)}: must be a mapping with a role and its text")
        self._values, self._where, self._info = values, where, info
        key = str(info.tags["role_tag"])
        self.tag = values.get(key)
        if not isinstance(self.tag, str):
            raise InvalidValueError(f"{where}: {key}: {shown(self.tag)}: must name the turn's role")
        self.kind = next((kind for kind in _ROLES if info.tags[kind] == self.tag), None)

    @property
    def answers(self) -> bool:
        return self.kind is not None and _ROLES[self.kind] == "assistant"

    def text(self) -> str:
        """The turn's text; "" for null. A list of OpenAI text parts is joined."""
        key = str(self._info.tags["content_tag"])
        value = self._values.get(key)
        if value is None and (self.answers or key in self._values):
            return ""
        if isinstance(value, list):
            value = "".join(self._part(part, key) for part in value)
        if not isinstance(value, str):
            raise InvalidValueError(f"{self._where}: {key}: {shown(value)}: must be text")
        return value

    def message(self) -> Message:
        assert self.kind, "the order is checked first"
        message: Message = {"role": _ROLES[self.kind], "content": self.text()}
        if self.kind == "user_tag" and not message["content"]:
            raise InvalidValueError(f"{self._where}: the question must not be empty")
        message |= {key: self._values[key] for key in _KEPT if isinstance(self._values.get(key), str)}
        if self._info.formatting == "openai" and self.answers and self._values.get("weight") is not None:
            message["weight"] = self._weight()
        calls = self._values.get("tool_calls") if self.answers else None
        if calls:
            message["tool_calls"] = read_calls(calls, f"{self._where}: tool_calls")
        elif self.kind == "function_tag":
            message |= self._function_call(message["content"])
        return message

    def _weight(self) -> int:
        """OpenAI's: an answer of weight 0 is read, and not learnt."""
        weight = self._values["weight"]
        if weight not in (0, 1) or isinstance(weight, bool):
            raise InvalidValueError(f"{self._where}: weight: {shown(weight)}: must be 0, not learnt from, or 1")
        return int(weight)

    def _function_call(self, text: str) -> Message:
        """Parses sharegpt's calls: JSON text, optionally preceded by a thought."""
        thought = _THOUGHT.match(text)
        call = text[thought.end() :] if thought else text
        calls = read_calls(decode_line(call, f"{self._where}: {self.tag}"), f"{self._where}: {self.tag}")
        return {"content": thought.group(1) if thought else "", "tool_calls": calls}

    def _part(self, part: Any, key: str) -> str:
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            return part["text"]
        raise InvalidValueError(f"{self._where}: {key}: {shown(part)}: only parts of type text are learnt from")


def _check_order(turns: list[_Turn], info: DatasetInfo) -> None:
    if not turns:
        raise RowSkipped("it has no turns")
    tool_runs = info.formatting == "openai"
    previous: _Turn | None = None
    for turn in turns:
        if turn.kind is None:
            known = sorted(tag for kind in _ROLES if (tag := info.tags[kind]))
            raise RowSkipped(f"wrong role {shown(turn.tag)}; roles are {', '.join(known)}")
        same_run = tool_runs and previous is not None and previous.kind == turn.kind == "observation_tag"
        if not same_run and turn.answers != (previous is not None and not previous.answers):
            after = f"follows {previous.tag!r}" if previous else "comes first"
            raise RowSkipped(f"wrong order of roles: {turn.tag!r} {after}; questions and answers must alternate")
        previous = turn


def _check_end(turns: list[_Turn], info: DatasetInfo) -> None:
    if turns[-1].answers is info.ranking:
        needed = "a question, which chosen and rejected answer" if info.ranking else "an answer"
        raise RowSkipped(f"wrong number of turns: the last is {turns[-1].tag!r}, it must be {needed}")


def _answer(cells: Cells, name: str, info: DatasetInfo) -> Message:
    cells.present(name)
    value = cells.structure(name)
    if not isinstance(value, dict):
        role, content = info.tags["role_tag"], info.tags["content_tag"]
        raise cells.error(name, f"must be one turn of the assistant, {{{role!r}: ..., {content!r}: ...}}")
    turn = _Turn(value, f"{cells.where}: {info.columns[name]}", info)
    if not turn.answers:
        raise RowSkipped(f"wrong role {shown(turn.tag)} of {info.columns[name]}; it must be the assistant's")
    return turn.message()
