"""Rewrites clients' variants of a body into the form that SGLang reads.

- Removes an unsupported field whose value disables it: null, false, its neutral value, and in OpenAI's bodies also an
  empty list or object.
- Removes `null` fields in OpenAI's bodies, where null means an omitted field.
- Renames a message's `reasoning`, the name in vLLM and OpenRouter, to `reasoning_content`.
- Gives text parts with the type names of /v1/responses the type "text".
"""

from __future__ import annotations

import functools
from typing import Any

from kt_runtime.serve.requests.bodies.bounds import Body
from kt_runtime.serve.requests.bodies.structs import structs_at
from kt_runtime.serve.requests.checks.refusal import Refusal

TEXT_TYPES = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # part type -> key of its text


def normal_form(value: dict[str, Any], body_type: type[Body]) -> dict[str, Any]:
    """`value` itself if it is already in normal form, else a changed copy. Raises Refusal (400)."""
    kept = _without_defaults(value, body_type)
    if isinstance(kept.get("messages"), list) and "reasoning_content" in _fields_of(body_type, "messages"):
        messages = [_message(one) for one in kept["messages"]]
        if any(new is not old for new, old in zip(messages, kept["messages"], strict=True)):
            kept = {**kept, "messages": messages}
    if kept.get("max_tokens") == 0 and "echo" in _fields_of(body_type, ""):
        raise Refusal(
            400,
            "max_tokens 0: at least one token is computed. Send 1 and leave the last token out, or POST to /generate "
            "with `max_new_tokens: 0`, `return_logprob: true` and `logprob_start_len: 0`",
            field="max_tokens",
        )
    return kept


def _without_defaults(value: dict[str, Any], body_type: type[Body]) -> dict[str, Any]:
    """`value` without omitted fields, including those in `sampling_params` and `parameters`."""
    kept = {key: inner for key, inner in value.items() if not _is_left_out(key, inner, body_type)}
    changed = len(kept) < len(value)
    for key in ("sampling_params", "parameters"):
        inner_type = next(iter(_bodies_of(body_type, key)), None)
        inner = kept.get(key)
        if inner_type is not None and isinstance(inner, dict):
            kept[key] = _without_defaults(inner, inner_type)
            changed |= kept[key] is not inner
        elif inner_type is not None and isinstance(inner, list):
            kept[key] = [_without_defaults(one, inner_type) if isinstance(one, dict) else one for one in inner]
            changed |= any(new is not old for new, old in zip(kept[key], inner, strict=True))
    return kept if changed else value


def _is_left_out(key: str, value: Any, body_type: type[Body]) -> bool:
    if value is None and body_type.null_is_left_out:
        return True
    if key not in body_type.left_out:
        return False
    is_empty = body_type.null_is_left_out and value in ([], {})
    neutral = body_type.neutral
    return value is None or value is False or is_empty or (key in neutral and _same(value, neutral[key]))


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    changed = dict(message)
    if "reasoning" in message:
        reasoning = changed.pop("reasoning")
        if changed.get("reasoning_content") is None:
            changed["reasoning_content"] = reasoning
    content = message.get("content")
    if isinstance(content, list):
        parts = [_part(part) for part in content]
        if any(new is not old for new, old in zip(parts, content, strict=True)):
            changed["content"] = parts
    return message if changed == message else changed


def _part(part: Any) -> Any:
    text_at = TEXT_TYPES.get(part["type"]) if isinstance(part, dict) and isinstance(part.get("type"), str) else None
    return part if text_at is None or text_at not in part else {"type": "text", "text": part[text_at]}


@functools.cache
def _bodies_of(body_type: type[Body], name: str) -> tuple[type[Body], ...]:
    return tuple(structs_at(body_type, f".{name}")) or tuple(structs_at(body_type, f".{name}[0]"))


@functools.cache
def _fields_of(body_type: type[Body], name: str) -> frozenset[str]:
    kinds = _bodies_of(body_type, name) if name else (body_type,)
    return frozenset(field for kind in kinds for field in kind.__struct_fields__)
