"""Runs SGLang on a machine without CUDA: the entry point `sglang.srt.platforms`.

Symbols: `sglang.srt.platforms.cpu.CpuDeviceMixin`, `.interface.SRTPlatform` (SGLang 0.5.23). Reason: the CPU platform
in SGLang's wheel needs SGLang's kernel library, which needs the CUDA driver. An out-of-tree platform with dispatch key
`native` selects the torch implementations instead. If CUDA is available, SGLang keeps its own platform. An accelerator
that is not CUDA (the emulated one of the tests) gets the torch implementations too, on its own device.

Without CUDA the packages of `ONLY_FOR_CUDA` are not imported either. SGLang tries them wherever they are installed, and
uses its own code where the import fails. SGLang asks for its platform before it imports them.

SGLang must not be imported while it discovers plugins, so the class is created when SGLang looks it up by name.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from kt_runtime.errors import KtError
from kt_runtime.resident.memory import return_freed_memory
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.options import ACCELERATOR_ATTENTION, ATTENTION_BACKEND
from kt_runtime.sglang_patch.version import check_version

SYMBOLS = (
    "sglang.srt.platforms.cpu.CpuDeviceMixin",
    "sglang.srt.platforms.device_mixin.PlatformEnum",
    "sglang.srt.platforms.interface.PlatformCapabilities",
    "sglang.srt.platforms.interface.SRTPlatform",
)
# Kernels for NVIDIA's GPUs and compilers of such kernels. Their imports take seconds, and no other device runs them.
ONLY_FOR_CUDA = ("flashinfer", "cutlass", "tilelang", "humming", "quack")

if TYPE_CHECKING:
    import torch


def activate() -> str | None:
    """Name of the platform class, or None if CUDA is available. Raises SystemExit for another SGLang version.

    Without CUDA, importing a package of `ONLY_FOR_CUDA` raises ModuleNotFoundError in this process from now on.
    """
    from kt_runtime import device

    try:
        check_version()
    except KtError as error:
        raise SystemExit(f"kt-runtime: {error}") from error
    if device.has_cuda():
        return None
    for package in ONLY_FOR_CUDA:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # as if it was not installed
    name = "CpuPlatform" if device.accelerator() is None else "AcceleratorPlatform"
    return f"kt_runtime.sglang_patch.platform:{name}"


def install(hooks: Hooks) -> None:
    """Only sets an environment variable, so that a crash does not wait a minute for a GPU's core dump.

    SGLang finds `activate` by its entry point.
    """
    if not hooks.has_cuda_kernels:
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "0")


def __getattr__(name: str) -> Any:
    make = {"CpuPlatform": _platform_class, "AcceleratorPlatform": _accelerator_class}.get(name)
    if make is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return make()


def _platform_class() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class CpuPlatform(CpuDeviceMixin, SRTPlatform):
        """A CPU without Triton, CUDA graphs or pinned memory."""

        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()

        def apply_server_args_defaults(self, server_args: Any) -> None:
            # SGLang has already replaced a missing value by its AMX backend, which needs the kernel library.
            if server_args.attention_backend in (None, "intel_amx"):
                server_args.attention_backend = ATTENTION_BACKEND

        def get_default_attention_backend(self) -> str:
            return ATTENTION_BACKEND

        def empty_cache(self) -> None:
            """SGLang calls it after a flush of the cache. A training session makes the C library keep freed memory."""
            super().empty_cache()
            return_freed_memory()

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

        def get_kv_pool_cls(self, *, kind: Any) -> type | None:
            from kt_runtime.sglang_patch.models.sparse_attention import pool_class

            return pool_class() if kind == "mla" else None

        def get_dispatch_key_name(self) -> str:
            return "native"

    return CpuPlatform


def _accelerator_class() -> type:
    """Platform class for the accelerator of this process, which is not CUDA."""
    import torch
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    from kt_runtime import device

    found = device.accelerator()
    assert found is not None
    kind: torch.device = found

    class AcceleratorPlatform(SRTPlatform):
        """PyTorch's operators on an accelerator: no Triton, no graphs, pinned memory."""

        _enum = PlatformEnum.OOT
        device_name = device_type = kind.type
        capabilities = PlatformCapabilities()

        def apply_server_args_defaults(self, server_args: Any) -> None:
            if server_args.attention_backend is None:
                server_args.attention_backend = ACCELERATOR_ATTENTION

        def get_default_attention_backend(self) -> str:
            return ACCELERATOR_ATTENTION

        def get_device(self, device_id: int = 0) -> torch.device:
            return torch.device(kind.type, device_id)

        def get_group_coordinator_device(self, local_rank: int) -> torch.device:
            return self.get_device(local_rank)

        def set_device(self, device: torch.device) -> None:
            torch.accelerator.set_device_index(device)

        def get_device_total_memory(self, device_id: int = 0) -> int:
            return device.memory(self.get_device(device_id)).total_bytes

        def get_current_memory_usage(self, where: Any = None) -> float:
            found = device.memory(self.get_device(torch.accelerator.current_device_index()))
            return float(found.total_bytes - found.free_bytes)

        def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
            found = device.memory(self.get_device(device_id))
            return found.free_bytes, found.total_bytes

        def empty_cache(self) -> None:
            torch.accelerator.empty_cache()
            return_freed_memory()

        def synchronize(self) -> None:
            torch.accelerator.synchronize()

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return True

        def get_dispatch_key_name(self) -> str:
            return "native"

    return AcceleratorPlatform
