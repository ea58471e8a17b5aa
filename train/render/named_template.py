"""Renders messages with one of LLaMA-Factory's named templates, as its versions 0.9.4 to 0.9.5 do.

Each slot is tokenised separately, and a reasoning template adds an empty think block to every answer without one. Tools
follow the system prompt, calls are part of an answer's text, and tool results are turns of their own
(`templates.tool_formats`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.data.conversations import is_learnt
from kt_runtime.train.render.pieces import Messages, Piece, Tools
from kt_runtime.train.templates.table import BOS, CONTENT, EOS, Template

THINK, END_THINK = "<think>", "</think>"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
_BETWEEN_OBSERVATIONS = "\n</tool_response>\n<tool_response>\n"  # in LLaMA-Factory's OpenAI rows, for every template
_THOUGHT = re.compile(r"<think>\n.*?\n</think>\n\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """Renders messages with a LLaMA-Factory template. `enable_thinking` None means True, LLaMA-Factory's default."""

    name: str
    template: Template
    bos: str
    eos: str
    enable_thinking: bool | None = None
    preserve_thinking: bool = False

    @property
    def end(self) -> str:
        return self.eos if self.template.end == EOS else self.template.end

    def conversation(self, messages: Messages, tools: Tools, where: str, *, last_only: bool) -> list[Piece]:
        messages = self._as_text(messages)
        if self._silent:
            messages = [_without_thought(message) for message in messages]
        pieces = self._opening(messages, tools)
        turns = _turns(messages)
        for number, message in enumerate(turns, start=1):
            turn = self._turn(message, where)
            learnt = is_learnt(message) and (number == len(turns) or not last_only)
            pieces += turn if learnt else [piece.none for piece in turn]
        return pieces

    def prompt(self, messages: Messages, tools: Tools, where: str) -> list[Piece]:
        """As LLaMA-Factory's chat and preferences: drops the reasoning of earlier turns unless it is preserved."""
        messages = self._as_text(messages)
        pieces = self._opening(messages, tools)
        for message in _turns(messages):
            if message["role"] == "assistant":
                forgets = self.template.reasoning and not self.preserve_thinking
                earlier = _without_thought(message) if forgets else message
                pieces += self._fill(self.template.assistant, earlier["content"])
            else:
                pieces += self._turn(message, where)
        return [*pieces, Piece(EMPTY_THOUGHT)] if self._silent else pieces

    def reply(
        self, messages: Messages, answer: dict[str, Any], tools: Tools, where: str
    ) -> tuple[list[Piece], list[Piece]]:
        (message,) = self._as_text([answer])
        message = _without_thought(message) if self._silent else message
        return self.prompt(messages, tools, where), [
            piece for piece in self._turn(message, where) if piece.num_answer_chars
        ]

    @property
    def _silent(self) -> bool:
        """Whether the empty think block belongs to the prompt instead of the answer."""
        return self.template.reasoning and self.enable_thinking is False

    def _turn(self, message: dict[str, Any], where: str) -> list[Piece]:
        if message["role"] == "user":
            return self._fill(self.template.user, message["content"])
        if message["role"] == "tool":
            return self._fill(self.template.observation or self.template.user, message["content"])
        if message["role"] != "assistant":
            raise InvalidValueError(
                f"{where}: template {self.name!r} has no {message['role']} turn after the first one"
            )
        answer = [piece.whole for piece in self._fill(self.template.assistant, message["content"])]
        if not self.template.reasoning or THINK in message["content"] or END_THINK in message["content"]:
            return answer
        thought = Piece(EMPTY_THOUGHT)
        return [thought if self._silent else thought.whole, *answer]

    def _as_text(self, messages: Messages) -> list[dict[str, Any]]:
        """Messages with calls written into their answer's text, and consecutive tool results joined into one turn."""
        turns: list[dict[str, Any]] = []
        for message in messages:
            if message.get("tool_calls"):
                weight = {"weight": message["weight"]} if "weight" in message else {}
                turns.append({"role": "assistant", "content": self._with_calls(message), **weight})
            elif message["role"] == "tool" and turns and turns[-1]["role"] == "tool":
                joined = _BETWEEN_OBSERVATIONS.join((turns[-1]["content"], message["content"]))
                turns[-1] = {"role": "tool", "content": joined}
            else:
                turns.append(message)
        return turns

    def _with_calls(self, message: dict[str, Any]) -> str:
        calls = self.template.tools.calls([call["function"] for call in message["tool_calls"]])
        before = message["content"].rstrip()
        if not before:
            return calls
        return f"{before}\n\n{calls}" if before.endswith(END_THINK) else f"{before}\n{calls}"

    def _opening(self, messages: Messages, tools: Tools) -> list[Piece]:
        given = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
        system = given or self.template.default_system
        system += self.template.tools.tools([tool["function"] for tool in tools]) if tools else ""
        return self._fill(self.template.prefix, "") + (self._fill(self.template.system, system) if system else [])

    def _fill(self, slots: tuple[str, ...], content: str) -> list[Piece]:
        special = {BOS: self.bos, EOS: self.eos}
        texts = [special[slot] if slot in special else slot.replace(CONTENT, content) for slot in slots]
        return [Piece(text) for text in texts if text]


def _turns(messages: Messages) -> Messages:
    return messages[1:] if messages and messages[0]["role"] == "system" else messages


def _without_thought(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    return {**message, "content": _THOUGHT.sub("", message["content"]).lstrip("\n")}
