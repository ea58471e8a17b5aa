"""A small body for each generating route, and values that are of the wrong type for most fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kt_runtime.serve.http.route_table import rule_for
from kt_runtime.serve.requests.bodies.bounds import Body

MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

# By path; each is answered with status 200 by a server of a tiny model.
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}},
    "/vertex_generate": {"instances": [{"text": "hello"}], "parameters": {"sampling_params": {"max_new_tokens": 1}}},
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/invocations": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"model": "default", "input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"model": "default", "messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "default", "messages": MESSAGES},
    "/tokenize": {"prompt": "hello"},
    "/v1/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/detokenize": {"tokens": [5, 6]},
    "/v1/score": {"query": "hello", "items": ["a"], "label_token_ids": [5]},
    "/v1/decisions": {"input": "hello", "questions": [{"id": "a", "type": "yes_no", "question": "well?"}]},
    "/parse_function_call": {"text": "hello", "tool_call_parser": "qwen25", "tools": [TOOL]},
    "/separate_reasoning": {"text": "hello", "reasoning_parser": "deepseek-r1"},
}

# Bodies with what nests; every place in them is tried with every wrong value.
NESTED: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be"}]},
                {"role": "user", "content": "hello", "name": "me"},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "so",
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "seen"},
            ],
            "max_tokens": 1,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "stream_options": {"include_usage": True},
            "reasoning": {"effort": "low", "enabled": True},
            "chat_template_kwargs": {"thinking": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 1,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "string"}}}},
            },
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 1,
            "response_format": {
                "type": "json_schema",
                "schema": {"title": "a", "properties": {"strict": {"default": 1}}},
            },
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": "hello",
            "max_tokens": 1,
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
                "triggers": ["<a"],
            },
        },
    ),
    (
        "/v1/messages",
        {
            "model": "default",
            "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hello"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "seen"}]},
            ],
            "max_tokens": 1,
            "tools": [{"name": "look", "input_schema": {"type": "object", "properties": {}}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
            "output_config": {"effort": "low"},
        },
    ),
    (
        "/v1/responses",
        {
            "model": "default",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
                {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "seen"},
            ],
            "max_output_tokens": 16,
            "tools": [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}],
            "tool_choice": {"type": "function", "name": "look"},
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        },
    ),
    (
        "/v1/decisions",
        {
            "input": "hello",
            "questions": [
                {"id": "a", "type": "choice", "question": "which?", "options": [{"name": "x"}, {"name": "y"}]},
                {"id": "b", "type": "score", "question": "how?", "levels": ["low", "high"]},
            ],
        },
    ),
)

WRONG: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31 - 1, 2**63, -(2**63) - 1, 1.5, -1e300, "", "x", "\u0000", "(", "5"),
    *([], {}, [5], ["x"], [None], [[]], [{}], [[5], ["x"]], {"a": 1}, {"$ref": "#"}, {"type": "text"}),
)


def with_wrong_values(value: Any) -> Iterator[Any]:
    """`value` with each of `WRONG` in each place in it, one at a time."""
    places = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, inner in places:
        changes = [*WRONG, *(with_wrong_values(inner) if isinstance(inner, dict | list) else ())]
        for changed in changes:
            if isinstance(value, dict):
                yield {**value, key: changed}
            else:
                yield [*value[:key], changed, *value[key + 1 :]]


def body_type_of(path: str) -> type[Body]:
    """The struct of a POST's body."""
    rule = rule_for("POST", path)
    assert rule is not None and rule.body is not None
    return rule.body
