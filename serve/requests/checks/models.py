"""Checks that the model and the adapters in a request are served."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from typing import Any

from kt_runtime.serve.requests.bodies.control import LoadAdapter
from kt_runtime.serve.requests.bodies.generate import VertexGenerate
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


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name[:200], known, n=3, cutoff=0.5)
    listed = ", ".join(map(repr, known[:20])) + (f", ... ({len(known)} in all)" if len(known) > 20 else "")
    return (f"; did you mean {' or '.join(map(repr, near))}?" if near else ";") + f" served are: {listed or 'none'}"
