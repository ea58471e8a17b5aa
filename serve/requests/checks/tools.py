"""Bounds the total size of the schemas of a request's tools.

For every request SGLang validates each schema against JSON Schema's meta-schema, which blocks the event loop for some
0.12 ms per value in the schema, whatever the value's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kt_runtime.serve.requests.bodies.bounds import Body
from kt_runtime.serve.requests.bodies.chat import Tool
from kt_runtime.serve.requests.bodies.free_json import Checked
from kt_runtime.serve.requests.bodies.messages import AnthropicTool
from kt_runtime.serve.requests.checks.refusal import Refusal

MAX_TOOL_VALUES = 16 * 1024  # objects, lists, texts and numbers; two seconds of validation


def check_tools(request: Body) -> None:
    """Raises Refusal (400)."""
    found = sum(_num_values(schema.value) for schema in _schemas(request))
    if found > MAX_TOOL_VALUES:
        raise Refusal(
            400,
            f"the schemas of the tools have {found} JSON values in all; one request may have {MAX_TOOL_VALUES}",
            field="tools",
        )


def _schemas(request: Any) -> Iterator[Checked]:
    for tool in _tools(request):
        schema: Checked | None
        if isinstance(tool, Tool):
            schema = tool.function.parameters
        else:
            schema = tool.input_schema if isinstance(tool, AnthropicTool) else tool
        if schema is not None:
            yield schema


def _tools(request: Any) -> Iterator[Any]:
    yield from getattr(request, "tools", None) or ()
    for message in getattr(request, "messages", None) or ():
        yield from getattr(message, "tools", None) or ()


def _num_values(value: Any) -> int:
    found, left = 0, [value]
    while left:
        found += 1
        one = left.pop()
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
    return found
