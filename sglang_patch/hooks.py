"""Patches SGLang through `HookRegistry`, SGLang 0.5.23's own mechanism for plugins.

SGLang logs and ignores a hook that can't be applied, but a half-patched server would compute wrong answers. So
`Hooks.apply` applies the hooks itself and raises an error if one of them could not be applied.

A function that is hooked is also replaced in the modules that have imported it. For that the registry's
`_propagate_patch` reads all attributes of all modules for each of some 130 functions: half a million attributes each
time, together some seconds of a server's start. Meanwhile `Bindings`, which reads them once, takes its place. It leaves
out the modules of libraries that import nothing of SGLang: three quarters of all attributes. In modules of SGLang and
of kt-runtime it looks for functions and classes under a few names: a test compares that with all attributes.
To read an attribute is to count a reference, and in a fork that costs a copy of the memory that the object lies in.
"""

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from kt_runtime.errors import ConflictError

SYMBOLS = ("sglang.srt.plugins.hook_registry.HookRegistry", "sglang.srt.plugins.hook_registry._propagate_patch")

Hook = Callable[..., Any]

LIBRARIES = frozenset(
    (
        *("Cython", "IPython", "PIL", "accelerate", "aiohttp", "anyio", "boto3", "botocore", "click"),
        *("compressed_tensors", "cutlass", "cython", "dill", "fastapi", "filelock", "fsspec", "gguf"),
        *("google", "httpcore", "httpx", "huggingface_hub", "jinja2", "loguru", "mistral_common", "mpmath", "msgspec"),
        *("numpy", "openai", "opentelemetry", "pandas", "peft", "prometheus_client", "psutil", "pydantic", "pygments"),
        *("pynvml", "regex", "requests", "rich", "scipy", "sklearn", "starlette", "sympy", "timm", "tokenizers"),
        *("torch", "torchao", "torchaudio", "torchcodec", "torchvision", "traitlets", "transformers", "triton"),
        *("triton_kernels", "tvm_ffi", "urllib3", "uvicorn", "xgrammar", "yaml", "zmq"),
        *sys.stdlib_module_names,
    )
)
"""Packages that no function or class of SGLang is imported into."""
OWN_NAMES = frozenset(("sglang", "kt_runtime"))
"""Packages whose modules hold functions and classes under their own names or OTHER_NAMES, and no methods."""
OTHER_NAMES = frozenset(
    (
        *("apply_kv_b_lora_q_correction", "apply_kv_b_lora_v_correction"),
        *("biased_grouped_topk_gpu", "fused_topk_torch_native", "grouped_topk_gpu"),
    )
)


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
        from sglang.srt.plugins import hook_registry
        from sglang.srt.plugins.hook_registry import HookRegistry

        propagate = hook_registry._propagate_patch
        hook_registry._propagate_patch = Bindings(HookRegistry._hooks, propagate).propagate
        try:
            HookRegistry.apply_hooks()
        finally:
            hook_registry._propagate_patch = propagate
        check_applied(self.targets, HookRegistry._patched)
        for target, value, is_there in self._attributes:
            _set_attribute(target, value, is_there)

    def _register(self, target: str, hook: Hook, kind: str) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(target, hook, HookType[kind])
        self.targets.append(target)


class Bindings:
    """Which modules hold the functions and classes that `targets` name. Not thread-safe."""

    def __init__(self, targets: Iterable[str], propagate: Callable[[object, object, object], int]) -> None:
        """`propagate`: SGLang's function, for an object that no target named: a method of a class that was replaced."""
        self._propagate = propagate
        self._objects: dict[int, object] = {}  # by id; they are kept, so that no other object gets their ids
        self._names = set(OTHER_NAMES)  # of those that modules hold: a class holds a method
        for target in targets:
            owner, found = _hooked(target)
            if found is not None:
                self._objects[id(found)] = found
                if isinstance(owner, ModuleType):
                    self._names.add(target.rpartition(".")[2])
        self._places: dict[int, list[tuple[ModuleType, str]]] = {each: [] for each in self._objects}
        self._num_attributes: dict[str, int] = {}  # of each module, when it was read
        self._num_modules = 0

    def propagate(self, original: object, wrapped: object, source_module: object) -> int:
        """As `_propagate_patch`: puts `wrapped` where modules hold `original`, except in `source_module`, a module or
        class that has it already. Returns in how many places."""
        if id(original) not in self._objects:
            return self._propagate(original, wrapped, source_module)
        self._read_modules()
        self._objects[id(wrapped)] = wrapped  # which another target may name, in another module
        places = self._places[id(wrapped)] = []
        if isinstance(source_module, ModuleType):
            places += [(source_module, name) for name, value in vars(source_module).items() if value is wrapped]
        count = 0
        for module, name in self._places[id(original)]:
            if module is not source_module and vars(module).get(name) is original:
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(module, name, wrapped)
                    places.append((module, name))
                    count += 1
        return count

    def _read_modules(self) -> None:
        """Once, and after imports: new modules, and those that got attributes, as modules loaded on demand do."""
        if len(sys.modules) == self._num_modules:
            return
        for key in list(sys.modules):  # without a reference to the modules of libraries
            package = key.partition(".")[0]
            if package in LIBRARIES or not isinstance(module := sys.modules.get(key), ModuleType):
                continue
            attributes = vars(module)
            if len(attributes) == self._num_attributes.get(key):
                continue
            self._num_attributes[key] = len(attributes)
            if package in OWN_NAMES:
                names = [name for name in self._names if name in attributes]
            elif self._objects.keys().isdisjoint(map(id, list(attributes.values()))):  # without a loop in Python
                continue
            else:
                names = list(attributes)
            for name in names:
                if id(attributes[name]) in self._objects:
                    self._places[id(attributes[name])].append((module, name))
        self._num_modules = len(sys.modules)


def _hooked(target: str) -> tuple[object, object]:
    """What the registry finds under `target`, and who owns it; None if it will report that there is nothing."""
    parent, _, name = target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(parent)
        raw = vars(owner).get(name) if isinstance(owner, type) else None
        return owner, raw.__func__ if isinstance(raw, classmethod | staticmethod) else getattr(owner, name)
    except (AttributeError, ImportError, ValueError):
        return None, None


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
