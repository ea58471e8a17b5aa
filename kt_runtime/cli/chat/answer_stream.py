"""Streams one answer from the server's streaming routes (server-sent events)."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any

import httpx

from kt_runtime.errors import RequestTimeoutError, RuntimeFault, ServerUnreachableError, UserError


def chat_pieces(http: httpx.Client, body: Mapping[str, Any]) -> Generator[str, None, None]:
    """Yields the answer's text from /v1/chat/completions.

    Raises UserError, RuntimeFault, ServerUnreachableError, RequestTimeoutError. Closing the iterator closes the
    connection, and the server aborts the answer.
    """
    finished = False
    for event in _events(http, "/v1/chat/completions", {**body, "stream": True}):
        for choice in event.get("choices") or ():
            finished = finished or choice.get("finish_reason") is not None
            if piece := (choice.get("delta") or {}).get("content"):
                yield piece
    if not finished:
        raise RuntimeFault("the answer ended before its end: the server closed the connection")


def generated_pieces(http: httpx.Client, body: Mapping[str, Any]) -> Generator[str, None, None]:
    """As `chat_pieces`, from SGLang's /generate, whose events carry the whole text so far."""
    shown, finished = "", False
    for event in _events(http, "/generate", {**body, "stream": True}):
        finished = finished or (event.get("meta_info") or {}).get("finish_reason") is not None
        text = str(event.get("text") or "")
        if text.startswith(shown):
            if text != shown:
                yield text[len(shown) :]
            shown = text
    if not finished:
        raise RuntimeFault("the answer ended before its end: the server closed the connection")


def _events(http: httpx.Client, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    try:
        with http.stream("POST", path, json=body) as answer:
            if not answer.is_success:
                answer.read()
                raise _error(answer.status_code, answer.text)
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise _error(_code(event["error"]), data)
                yield event
    except httpx.TimeoutException:
        raise RequestTimeoutError(f"{http.base_url}{path.lstrip('/')}: no answer in time") from None
    except httpx.TransportError as error:
        raise ServerUnreachableError(f"{http.base_url}: the connection failed: {error}") from None
    except ValueError:
        raise RuntimeFault(f"{http.base_url}{path.lstrip('/')}: the answer is not a stream of JSON events") from None


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _error(status: int, text: str) -> UserError | RuntimeFault:
    """The error as one line, from SGLang's two error formats or from plain text."""
    message = text
    try:
        value = json.loads(text)
        inner = value.get("error", value)
        message = inner.get("message", text) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError):
        pass
    line = f"the server answers {status}: {' '.join(str(message).split())[:500]}"
    return UserError(line) if 400 <= status < 500 else RuntimeFault(line)
