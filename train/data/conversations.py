"""Converted dataset rows: a conversation to learn from, a question with two answers, or a question to be answered.

Messages are plain mappings in the form of chat templates: {"role": "system" | "user" | "assistant" | "tool",
"content": str}, and for an assistant that calls tools "tool_calls": [{"type": "function", "function": {"name": str,
"arguments": {...}}}]. A row's "tool_call_id", "name" and "reasoning_content" are kept. An answer of a conversation with
"weight": 0 is read, and not learnt (`is_learnt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


def is_learnt(message: Message) -> bool:
    return bool(message.get("weight", 1))


@dataclass(frozen=True)
class Conversation:
    """`where` is the row's file:line. The last message is the assistant's."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None
    where: str


@dataclass(frozen=True)
class Preference:
    """`messages` ends with a user or tool turn; `chosen` and `rejected` are different assistant messages."""

    messages: tuple[Message, ...]
    chosen: Message
    rejected: Message
    tools: tuple[dict[str, Any], ...] | None
    where: str


@dataclass(frozen=True)
class Question:
    """`messages` ends with a user or tool turn. `answer`: the text of the row's answer, None if it has none.
    `columns`: the whole row as in its file, for rewards."""

    messages: tuple[Message, ...]
    answer: str | None
    columns: Mapping[str, Any]
    tools: tuple[dict[str, Any], ...] | None
    where: str
