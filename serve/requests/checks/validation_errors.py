"""Replaces SGLang's answer to a body that its schema refuses: SGLang's shows file paths, this one only field names."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from kt_runtime.serve.requests.checks.refusal import Refusal, answer

MAX_ERRORS, MAX_CHARACTERS = 5, 200


async def answer_validation_error(request: Request, error: Any) -> Response:
    """A handler for FastAPI's RequestValidationError."""
    path = request.url.path.removeprefix(request.scope.get("root_path") or "")
    found = [_one(detail) for detail in error.errors()[:MAX_ERRORS]]
    refusal = Refusal(400, "; ".join(found) or "the request does not fit the route's schema")
    return Response(answer(refusal, path), status_code=refusal.status, media_type="application/json")


def _one(detail: dict[str, Any]) -> str:
    place = ".".join(str(step) for step in detail.get("loc", ()) if step != "body")
    return f"{place or 'the body'}: {detail.get('msg', 'is wrong')}"[:MAX_CHARACTERS]
