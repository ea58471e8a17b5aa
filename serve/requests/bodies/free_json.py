"""Types with free content from the client, such as a JSON schema, bounded in bytes and depth.

msgspec calls `decode` for a field of one of these classes. Grammars are bounded in bytes here; their content is checked
when they are compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson

from kt_runtime.sglang_patch.grammar.stop_patterns import MAX_PATTERNS

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_FREE_BYTES = 64 * 1024
MAX_DEPTH = 64
# Arguments of `PreTrainedTokenizerBase.apply_chat_template`, `render_jinja_template` (transformers 5.19) and jinja's
# `render`. A second value for one is a TypeError, and `chat_template` would run a program from the client.
RENDERING_ARGUMENTS = frozenset(
    [
        *(
            "add_generation_prompt",
            "chat_template",
            "continue_final_message",
            "conversation",
            "conversations",
            "documents",
        ),
        *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self"),
        *("tokenize", "tokenizer_kwargs", "tools", "truncation"),
    ]
)
MAX_STOP_PATTERN_BYTES = 256  # SGLang's own


class Checked:
    """A checked value. `value` is unchanged from the client's."""

    def __init__(self, value: Any) -> None:
        self.value = value


class FreeObject(Checked):
    """Any JSON object of at most `MAX_FREE_BYTES` and `MAX_DEPTH` levels."""


class FreeValue(Checked):
    """Any JSON value of at most `MAX_FREE_BYTES` and `MAX_DEPTH` levels."""


class TemplateArguments(Checked):
    """Variables of the chat template, such as `enable_thinking`. None may be in `RENDERING_ARGUMENTS`."""


class SchemaObject(Checked):
    """A JSON schema as an object, for fields that SGLang reads before it validates the schema."""


class Grammar(Checked):
    """A schema, regular expression or grammar as text."""


class StopPattern(Checked):
    """A regular expression, or a list of them."""


def decode(kind: type, value: Any) -> Any:
    """`dec_hook` of msgspec: an instance of `kind`. Raises ValueError, to which msgspec adds the field's path."""
    return kind(_DECODERS[kind](value))


def _free_object(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"Expected `object`, got `{json_type(value)}`")
    return _free_value(value)


def _free_value(value: Any) -> Any:
    try:
        size = len(orjson.dumps(value))
    except TypeError:  # beyond orjson's own limit of 254 levels
        raise ValueError(f"is nested more than {MAX_DEPTH} deep") from None
    if size > MAX_FREE_BYTES:
        raise ValueError(f"is {size} bytes of JSON; allowed are {MAX_FREE_BYTES}")
    _check_depth(value)
    return value


def _template_arguments(value: Any) -> Any:
    for name in _free_object(value):
        if name in RENDERING_ARGUMENTS:
            raise ValueError(f"`{name}` is set by the server; variables of the chat template may have other names")
    return value


def _schema_object(value: Any) -> Any:
    _free_object(value)
    properties = value.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise ValueError("`properties` of a schema must be an object of schemas")
    if not isinstance(properties.get("strict", {}), dict) or not isinstance(value.get("title", ""), str):
        raise ValueError("`title` of a schema must be text, and its property `strict` an object")
    return value


def _grammar(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"Expected `str`, got `{json_type(value)}`")
    size = len(value.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise ValueError(f"is {size} bytes; allowed are {MAX_GRAMMAR_BYTES}")
    return value


def _stop_pattern(value: Any) -> Any:
    patterns = value if isinstance(value, list) else [value]
    if len(patterns) > MAX_PATTERNS:
        raise ValueError(f"has {len(patterns)} patterns; allowed are {MAX_PATTERNS}")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"Expected `str | array of str`, got `{json_type(pattern)}`")
        if len(pattern.encode()) > MAX_STOP_PATTERN_BYTES:
            raise ValueError(f"is {len(pattern.encode())} bytes; allowed are {MAX_STOP_PATTERN_BYTES}")
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"is no regular expression ({error})") from None
    return value


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"is nested more than {MAX_DEPTH} deep")
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]


def json_type(value: Any) -> str:
    """The type's name in msgspec's messages."""
    if value is None:
        return "null"
    return {bool: "bool", int: "int", float: "float", str: "str", list: "array"}.get(type(value), "object")


_DECODERS: dict[type, Callable[[Any], Any]] = {
    FreeObject: _free_object,
    FreeValue: _free_value,
    TemplateArguments: _template_arguments,
    SchemaObject: _schema_object,
    Grammar: _grammar,
    StopPattern: _stop_pattern,
}
