"""The refusal of a request before it reaches SGLang, and its answer in the format of the route's API."""

from __future__ import annotations

import json
from typing import Any

# OpenAI's and Anthropic's error types by status.
OPENAI_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
ANTHROPIC_TYPES = {**OPENAI_TYPES, 500: "api_error", 503: "overloaded_error"}
INVALID = "invalid_request_error"
TINKER_ROUTES = "/api/v1/"
OWN_ROUTES = ("/kt/", TINKER_ROUTES)  # of kt-runtime


class Refusal(Exception):
    """`field`: the wrong field, such as "sampling_params.top_k". `code`: a machine-readable word."""

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code


def answer(refusal: Refusal, path: str) -> bytes:
    """The error as JSON in the format of `path`'s API."""
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC_TYPES.get(refusal.status, INVALID)
        content: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": refusal.message}}
    elif path.startswith(TINKER_ROUTES):
        content = {"detail": refusal.message}
    elif path.startswith(OWN_ROUTES):
        content = {"error": {"message": refusal.message, "kind": "InvalidValueError"}}
    else:
        error = {
            "message": refusal.message,
            "type": OPENAI_TYPES.get(refusal.status, INVALID),
            "param": refusal.field,
            "code": refusal.code or refusal.status,
        }
        content = {"error": error}
    return json.dumps(content).encode()
