"""The model's own chat template, rendered as the server renders it."""

from __future__ import annotations

import json
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.data.conversations import is_learnt
from kt_runtime.train.render.answers import AnswerFinder, Render, closing_of
from kt_runtime.train.render.pieces import Messages, Piece, Tools


class ChatTemplate:
    """`options` are passed to the template by name (`enable_thinking`), as a request's chat_template_kwargs are."""

    def __init__(self, tokenizer: Any, options: dict[str, Any]) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._notes: dict[str, bool] = {}
        try:
            self._closing = closing_of(self._render(None, "a sample"))
        except InvalidValueError:
            self._closing = ""

    def text(self, messages: Messages, tools: Tools, where: str, *, add_generation_prompt: bool) -> str:
        """Raises InvalidValueError when the template refuses the messages."""
        return self._render(tools, where)(messages, add_generation_prompt)

    def conversation(self, messages: Messages, tools: Tools, where: str, *, last_only: bool) -> list[Piece]:
        text, spans = self._finder(tools, where).conversation(messages, where, last_only=last_only)
        answers = [message for message in messages if message["role"] == "assistant"][-len(spans) :]
        starts = [start for start, _ in spans]
        pieces = [Piece(text[: starts[0]])]
        for (start, end), following, answer in zip(spans, [*starts[1:], len(text)], answers, strict=True):
            pieces.append(Piece(text[start:following], end - start if is_learnt(answer) else 0))
        return pieces

    def prompt(self, messages: Messages, tools: Tools, where: str) -> list[Piece]:
        return [Piece(self.text(messages, tools, where, add_generation_prompt=True))]

    def reply(
        self, messages: Messages, answer: dict[str, Any], tools: Tools, where: str
    ) -> tuple[list[Piece], list[Piece]]:
        prompt, text = self._finder(tools, where).reply(messages, answer, where)
        return [Piece(prompt)], [Piece(text).whole]

    def new_notes(self) -> list[str]:
        """Notes for users on how the answers rendered so far are trained; each note is returned once."""
        fresh = [note for note, told in self._notes.items() if not told]
        self._notes.update(dict.fromkeys(fresh, True))
        return fresh

    def _note(self, note: str) -> None:
        self._notes.setdefault(note, False)

    def _finder(self, tools: Tools, where: str) -> AnswerFinder:
        return AnswerFinder(self._render(tools, where), self._closing, self._note)

    def _render(self, tools: Tools, where: str) -> Render:
        def render(messages: Messages, add_generation_prompt: bool) -> str:
            try:
                return self._apply(_as_served(messages), tools, add_generation_prompt)
            except TypeError:
                # A template that concatenates a call's arguments as text (DeepSeek-V3) fails on SGLang's mapping.
                return self._apply(_with_text_arguments(messages), tools, add_generation_prompt)

        def checked(messages: Messages, add_generation_prompt: bool) -> str:
            from jinja2 import TemplateError

            try:
                return render(messages, add_generation_prompt)
            except (TemplateError, TypeError, KeyError) as error:
                raise InvalidValueError(f"{where}: the model's chat template refuses this row: {error}") from None

        return checked

    def _apply(self, messages: list[dict[str, Any]], tools: Tools, add_generation_prompt: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._options,
        )
        return text


def _as_served(messages: Messages) -> list[dict[str, Any]]:
    """Messages as SGLang's OpenAI endpoint passes them to a template: no null fields, call arguments as mappings."""
    return [_message(message, _mapping) for message in messages]


def _with_text_arguments(messages: Messages) -> list[dict[str, Any]]:
    return [_message(message, _text) for message in messages]


def _message(message: dict[str, Any], arguments: Any) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value is not None and key != "weight"}
    served = {"content": "", **kept}
    if served.get("tool_calls"):
        served["tool_calls"] = [_call(call, arguments) for call in served["tool_calls"]]
    return served


def _call(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": arguments(function["arguments"])}}


def _mapping(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
