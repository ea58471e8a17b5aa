"""The formats of tools and calls in LLaMA-Factory's named templates, as of its versions 0.9.4 and 0.9.5.

A format renders a row's list of functions as text after the system prompt, and the calls of an answer as the answer's
text. `templates` assigns a format to each template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Function = Mapping[str, Any]
"""For a tool: name, description, parameters (JSON schema). For a call: name, arguments (a mapping)."""

_QWEN_HEAD = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
_QWEN_TAIL = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
# LLaMA-Factory inserts today's date here. A run whose text changes overnight could not be resumed, so the date is
# fixed: the default of Llama 3.1's own template.
_LLAMA3_HEAD = """Cutting Knowledge Date: December 2023
Today Date: 26 Jul 2024

You have access to the following functions. To call a function, please respond with JSON for a function call. Respond \
in the format {"name": function name, "parameters": dictionary of argument name and its value}. Do not use variables.

"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`tools`: the text about the functions in the system prompt. `calls`: an answer with at least one call."""

    tools: Callable[[Sequence[Function]], str]
    calls: Callable[[Sequence[Function]], str]


def _default_tools(functions: Sequence[Function]) -> str:
    listed = "".join(_default_tool(function) for function in functions)
    names = ", ".join(str(function["name"]) for function in functions)
    return (
        f"You have access to the following tools:\n{listed}Use the following format if using a tool:\n"
        f"```\nAction: tool name (one of [{names}])\n"
        "Action Input: the input to the tool, in a JSON format representing the kwargs "
        '(e.g. ```{"input": "hello world", "num_beams": 5}```)\n```\n'
    )


def _default_tool(function: Function) -> str:
    schema = _mapping(function.get("parameters"))
    required = _list(schema.get("required"))
    arguments = "".join(
        _default_argument(name, _mapping(schema_of), name in required)
        for name, schema_of in _mapping(schema.get("properties")).items()
    )
    description = function.get("description", "")
    return f"> Tool Name: {function['name']}\nTool Description: {description}\nTool Args:\n{arguments}\n"


def _default_argument(name: str, schema: Mapping[str, Any], is_required: bool) -> str:
    text = (
        f"  - {name} ({schema.get('type', '')}{', required' if is_required else ''}): {schema.get('description', '')}"
    )
    if values := _list(schema.get("enum")):
        text += f", should be one of [{', '.join(map(str, values))}]"
    if schema.get("items"):
        text += f", where each item should be {_mapping(schema['items']).get('type', '')}"
    return text + "\n"


def _default_calls(functions: Sequence[Function]) -> str:
    return "\n".join(
        f"Action: {function['name']}\nAction Input: {_json(function['arguments'])}" for function in functions
    )


def _qwen_tools(functions: Sequence[Function]) -> str:
    return _QWEN_HEAD + "".join(f"\n{_json(_wrapped(function))}" for function in functions) + _QWEN_TAIL


def _qwen_calls(functions: Sequence[Function]) -> str:
    texts = (_json({"name": function["name"], "arguments": function["arguments"]}) for function in functions)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def _llama3_tools(functions: Sequence[Function]) -> str:
    return _LLAMA3_HEAD + "".join(f"{_json(_wrapped(function), indent=4)}\n\n" for function in functions)


def _llama3_calls(functions: Sequence[Function]) -> str:
    calls = [{"name": function["name"], "parameters": function["arguments"]} for function in functions]
    return _json(calls[0] if len(calls) == 1 else calls)


def _wrapped(function: Function) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _mapping(value: Any) -> Mapping[str, Any]:
    """A part of a schema; an empty mapping if the row has none or another type there."""
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    """As `_mapping`, for a list."""
    return value if isinstance(value, list) else []


DEFAULT = ToolFormat(_default_tools, _default_calls)
QWEN = ToolFormat(_qwen_tools, _qwen_calls)
LLAMA3 = ToolFormat(_llama3_tools, _llama3_calls)
