"""What a dataset's row becomes: a conversation to learn from, or a question with a better and a worse answer.

Messages are plain mappings as chat templates take them: {"role": "system" | "user" | "assistant" | "tool",
"content": str} and, of an assistant that calls tools, "tool_calls": [{"type": "function", "function": {"name": str,
"arguments": {...}}}]; "tool_call_id", "name" and "reasoning_content" are kept where a row has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """`where` is the row's file:line. The last message is the assistant's."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None
    where: str


@dataclass(frozen=True)
class Preference:
    """`messages` ends with the user's or a tool's turn; `chosen` and `rejected` are assistant's and differ."""

    messages: tuple[Message, ...]
    chosen: Message
    rejected: Message
    tools: tuple[dict[str, Any], ...] | None
    where: str
