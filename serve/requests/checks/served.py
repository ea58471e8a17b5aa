"""Checks that the server has what a request needs: model, adapters, a parser of SGLang's, the route /v1/responses."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from typing import Any

from kt_runtime.serve.requests.bodies.bounds import Body
from kt_runtime.serve.requests.bodies.control import LoadAdapter
from kt_runtime.serve.requests.bodies.generate import VertexGenerate
from kt_runtime.serve.requests.bodies.responses import Responses
from kt_runtime.serve.requests.bodies.scoring import FunctionCallText, ReasoningText
from kt_runtime.serve.requests.checks.refusal import Refusal

# SGLang's model name for a request without one.
UNNAMED = "default"


class ServedModels:
    """`name`: the model's. `adapters` returns the adapters' names and is set when the server has started.

    `any_name`: an unknown name means the model, for clients that send a fixed name.
    """

    def __init__(self, name: str, *, any_name: bool = False) -> None:
        self.name, self.any_name = name, any_name
        self.adapters: Callable[[], Collection[str]] = tuple

    @property
    def reserved(self) -> frozenset[str]:
        """Names that no adapter may have, since they mean the model."""
        return frozenset({self.name, UNNAMED})

    def check(self, request: Any) -> None:
        """Raises Refusal (404) for a `model` or `lora_path` of `request` that is not served."""
        if isinstance(request, LoadAdapter):  # its `lora_path` is a directory
            return
        model = getattr(request, "model", None)
        if model is not None:
            self._check_model(model)
        asked = request.parameters if isinstance(request, VertexGenerate) else request
        paths = getattr(asked, "lora_path", None)
        for name in paths if isinstance(paths, list) else [paths]:
            if name is not None:
                self._check_adapter(name, "lora_path")

    def _check_model(self, model: str) -> None:
        if model in self.reserved or model in self.adapters():
            return
        base, _, adapter = model.partition(f"{self.name}:")
        if not base and adapter:
            self._check_adapter(adapter.strip(), "model")
        elif not self.any_name:
            known = [self.name, *(f"{self.name}:{name}" for name in sorted(self.adapters())), *sorted(self.adapters())]
            raise Refusal(404, f"unknown model {model[:200]!r}{_nearest(model, known)}", "model", "model_not_found")

    def _check_adapter(self, name: str, field: str) -> None:
        known = sorted(self.adapters())
        if name not in known:
            raise Refusal(404, f"unknown adapter {name[:200]!r}{_nearest(name, known)}", field, "model_not_found")


class KnownParsers:
    def __init__(self, tool_call: Collection[str], reasoning: Collection[str]) -> None:
        self._tool_call, self._reasoning = sorted(tool_call), sorted(reasoning)

    def check(self, request: Body) -> None:
        """Raises Refusal (400) for an unknown parser, which SGLang would answer with status 500."""
        if isinstance(request, FunctionCallText):
            _check_parser("tool_call_parser", request.tool_call_parser, self._tool_call)
        elif isinstance(request, ReasoningText):
            _check_parser("reasoning_parser", request.reasoning_parser, self._reasoning)


class ResponsesThere:
    """/v1/responses is there only where SGLang could prepare it: for gpt-oss it needs the vocabulary of OpenAI's
    harmony format, which `openai_harmony` downloads when the server starts.

    `is_there()`: whether SGLang has prepared the route; known once the server has started.
    """

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


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name[:200], known, n=3, cutoff=0.5)
    listed = ", ".join(map(repr, known[:20])) + (f", ... ({len(known)} in all)" if len(known) > 20 else "")
    return (f"; did you mean {' or '.join(map(repr, near))}?" if near else ";") + f" served are: {listed or 'none'}"


def _check_parser(field: str, name: str, known: list[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise Refusal(400, f"{field} {name!r} is unknown{hint} known: {', '.join(known)}", field=field)
