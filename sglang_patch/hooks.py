"""How a module of this package patches SGLang: through `HookRegistry`, SGLang 0.5.23's own mechanism for plugins.

SGLang logs and ignores a hook that can't be applied; a half-patched server would compute wrong answers. So `apply`
applies the hooks itself and fails if one of them did not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kt_runtime.errors import ConflictError

Hook = Callable[..., Any]


class Hooks:
    """What `install(hooks)` of a patch module gets. `on_cpu`: this machine has no CUDA device."""

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.targets: list[str] = []

    def before(self, target: str, hook: Hook) -> None:
        """`hook(*args, **kwargs)` returns `(args, kwargs)` to change them, or None."""
        self._register(target, hook, "BEFORE")

    def after(self, target: str, hook: Hook) -> None:
        """`hook(result, *args, **kwargs)` returns a new result, or None to keep it."""
        self._register(target, hook, "AFTER")

    def around(self, target: str, hook: Hook) -> None:
        """`hook(original, *args, **kwargs)` returns the result."""
        self._register(target, hook, "AROUND")

    def replace(self, target: str, hook: Hook) -> None:
        """`hook` stands in the place of the function or class `target`."""
        self._register(target, hook, "REPLACE")

    def apply(self) -> None:
        """Applies what was registered. Raises ConflictError naming the targets that SGLang could not patch."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.apply_hooks()
        check_applied(self.targets, HookRegistry._patched)

    def _register(self, target: str, hook: Hook, kind: str) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(target, hook, HookType[kind])
        self.targets.append(target)


def check_applied(targets: Iterable[str], applied: Iterable[str]) -> None:
    missing = sorted(set(targets) - set(applied))
    if missing:
        raise ConflictError(f"SGLang could not be patched at {', '.join(missing)}; the log has the reason")
