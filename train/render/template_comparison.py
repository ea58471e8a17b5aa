"""Reports how a named template differs from the chat template that the server uses."""

from __future__ import annotations

from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.render.chat_template import ChatTemplate
from kt_runtime.train.render.named_template import NamedTemplate
from kt_runtime.train.render.pieces import Messages

_SAMPLES: tuple[Messages, ...] = (
    ({"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello!"}),
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A helper."},
    ),
)


def compare(named: NamedTemplate, served: ChatTemplate | None, tokenizer: Any, where: str) -> str | None:
    """A warning with both renderings of the first sample that differs; None when all are equal."""
    heading = f"{where}: template: {named.name}"
    if served is None:
        return f"{heading}: the model has no chat template of its own, so the server can't answer in the trained format"
    for messages in _SAMPLES:
        for what, ours, theirs in (
            ("prompt", _prompt(named, messages), _served(served, messages[:-1], True)),
            ("conversation", _conversation(named, messages), _served(served, messages, False)),
        ):
            if ours != theirs:
                return (
                    f"{heading}: trains a format other than the one the server answers in; leave `template` out to "
                    f"train the server's. The same {what} as\n  {named.name}: {ours!r}\n  the server: {theirs!r}"
                    + _unknown_end(named, tokenizer)
                )
    return None


def _prompt(named: NamedTemplate, messages: Messages) -> str:
    return "".join(piece.text for piece in named.prompt(messages[:-1], None, "a sample"))


def _conversation(named: NamedTemplate, messages: Messages) -> str:
    return "".join(piece.text for piece in named.conversation(messages, None, "a sample", last_only=False))


def _served(served: ChatTemplate, messages: Messages, add_generation_prompt: bool) -> str:
    try:
        return served.text(messages, None, "a sample", add_generation_prompt=add_generation_prompt)
    except InvalidValueError as error:
        return f"({error})"


def _unknown_end(named: NamedTemplate, tokenizer: Any) -> str:
    if not named.end or len(tokenizer(named.end, add_special_tokens=False)["input_ids"]) == 1:
        return ""
    return f"\n  {named.end!r} is not a token of this model: answers are trained to end with text that stops nothing"
