"""/v1/responses is there only where SGLang could prepare it: for gpt-oss it needs the vocabulary of OpenAI's harmony
format, which `openai_harmony` downloads when the server starts."""

from __future__ import annotations

from collections.abc import Callable

from kt_runtime.serve.requests.bodies.bounds import Body
from kt_runtime.serve.requests.bodies.responses import Responses
from kt_runtime.serve.requests.checks.refusal import Refusal


class ResponsesThere:
    """`is_there()`: whether SGLang has prepared the route; known once the server has started."""

    def __init__(self, is_there: Callable[[], bool]) -> None:
        self._is_there = is_there

    def check(self, request: Body) -> None:
        if isinstance(request, Responses) and not self._is_there():
            raise Refusal(
                501,
                "/v1/responses is not available for this model: SGLang could not prepare it at the start; the log "
                "says why (for gpt-oss it needs harmony's vocabulary, from the network or, with "
                "TIKTOKEN_ENCODINGS_BASE, from a directory); /v1/chat/completions answers",
            )
