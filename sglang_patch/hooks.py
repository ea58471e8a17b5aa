"""Patches SGLang through `HookRegistry`, SGLang 0.5.23's own mechanism for plugins.

SGLang logs and ignores a hook that can't be applied, but a half-patched server would compute wrong answers. So
`Hooks.apply` applies the hooks itself and raises an error if one of them could not be applied.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

from kt_runtime.errors import ConflictError

Hook = Callable[..., Any]


class Hooks:
    """The argument of each patch module's `install(hooks)`.

    `on_cpu`: the process has no accelerator, and attention and dense layers are on the CPU too. `has_cuda_kernels`: the
    kernels of Triton and of SGLang's libraries run; None: on every accelerator. An accelerator without them (the
    emulated one of the tests) has PyTorch's operators only.
    """

    def __init__(self, on_cpu: bool, has_cuda_kernels: bool | None = None) -> None:
        self.on_cpu = on_cpu
        self.has_cuda_kernels = not on_cpu if has_cuda_kernels is None else has_cuda_kernels
        self.targets: list[str] = []
        self._attributes: list[tuple[str, Any, bool]] = []

    @classmethod
    def for_this_process(cls) -> Hooks:
        from kt_runtime import device  # imports torch; the command line must not wait for that

        return cls(on_cpu=device.accelerator() is None, has_cuda_kernels=device.has_cuda())

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
        """`hook` replaces the function or class `target`."""
        self._register(target, hook, "REPLACE")

    def add(self, target: str, value: Any) -> None:
        """Sets the attribute `target`, which must not exist yet, to `value`."""
        self._attributes.append((target, value, False))

    def set(self, target: str, value: Any) -> None:
        """Sets the existing attribute `target` to `value`: for numbers and other attributes that are not functions."""
        self._attributes.append((target, value, True))

    def apply(self) -> None:
        """Applies all registered hooks. Raises ConflictError that names the targets that could not be patched."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.apply_hooks()
        check_applied(self.targets, HookRegistry._patched)
        for target, value, is_there in self._attributes:
            _set_attribute(target, value, is_there)

    def _register(self, target: str, hook: Hook, kind: str) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(target, hook, HookType[kind])
        self.targets.append(target)


def check_applied(targets: Iterable[str], applied: Iterable[str]) -> None:
    missing = sorted(set(targets) - set(applied))
    if missing:
        raise ConflictError(f"SGLang could not be patched at {', '.join(missing)}; the log has the reason")


def _set_attribute(target: str, value: Any, is_there: bool) -> None:
    parent, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(parent)
    found = getattr(owner, name, _ABSENT)
    if found is value:  # patched before, in the same process
        return
    if is_there != (found is not _ABSENT):
        raise ConflictError(f"SGLang could not be patched: {target} {'is missing' if is_there else 'exists already'}")
    setattr(owner, name, value)


_ABSENT = object()
