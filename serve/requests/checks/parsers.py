"""Checks that the parser in a request is one of SGLang's."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from kt_runtime.serve.requests.bodies.bounds import Body
from kt_runtime.serve.requests.bodies.scoring import FunctionCallText, ReasoningText
from kt_runtime.serve.requests.checks.refusal import Refusal


class KnownParsers:
    def __init__(self, tool_call: Collection[str], reasoning: Collection[str]) -> None:
        self._tool_call, self._reasoning = sorted(tool_call), sorted(reasoning)

    def check(self, request: Body) -> None:
        """Raises Refusal (400) for an unknown parser, which SGLang would answer with status 500."""
        if isinstance(request, FunctionCallText):
            _check("tool_call_parser", request.tool_call_parser, self._tool_call)
        elif isinstance(request, ReasoningText):
            _check("reasoning_parser", request.reasoning_parser, self._reasoning)


def _check(field: str, name: str, known: list[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise Refusal(400, f"{field} {name!r} is unknown{hint} known: {', '.join(known)}", field=field)
