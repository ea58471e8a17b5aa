"""The schemas of a request's tools, wherever they stand, are bounded together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from reference.server.request_bodies import MESSAGES, body_type_of

from kt_runtime.serve.requests.checks.checking import parsed
from kt_runtime.serve.requests.checks.refusal import Refusal
from kt_runtime.serve.requests.checks.tools import MAX_TOOL_VALUES, check_tools

WIDE = {"allOf": [True] * (MAX_TOOL_VALUES // 2)}
USUAL = {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "x"} for i in range(20)}}


def openai(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def anthropic(schema: Any) -> dict[str, Any]:
    return {"name": "f", "input_schema": schema}


def check(path: str, **body: Any) -> None:
    check_tools(parsed(json.dumps({"model": "m", **body}).encode(), body_type_of(path))[0])


def bodies(schema: Any, number: int) -> list[tuple[str, dict[str, Any]]]:
    with_tools = {"role": "system", "content": "x", "tools": [openai(schema)] * number}
    return [
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [openai(schema)] * number}),
        ("/v1/chat/completions", {"messages": [with_tools]}),
        ("/v1/tokenize", {"messages": MESSAGES, "tools": [openai(schema)] * number}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "tools": [anthropic(schema)] * number}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": schema}] * number}),
    ]


@pytest.mark.parametrize(("path", "body"), bodies(WIDE, 2))
def test_wide_schemas_are_refused(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=r"tools have 16\d+ JSON values in all; one request may have 16384"):
        check(path, **body)


@pytest.mark.parametrize(("path", "body"), [*bodies(WIDE, 1), *bodies(USUAL, 100), *bodies(None, 3)])
def test_usual_tools_are_not(path: str, body: dict[str, Any]) -> None:
    check(path, **body)


def test_request_without_tools_passes() -> None:
    check_tools(parsed(b'{"text": "a"}', body_type_of("/generate"))[0])
