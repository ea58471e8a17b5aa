"""Runs SGLang on a machine without a GPU: the entry point `sglang.srt.platforms`.

Symbols: `sglang.srt.platforms.cpu.CpuDeviceMixin`, `.interface.SRTPlatform` (SGLang 0.5.23). Reason: the CPU platform
in SGLang's wheel needs SGLang's kernel library, which needs the CUDA driver. An out-of-tree platform with dispatch key
`native` selects the torch implementations instead. If CUDA is available, SGLang keeps its own platform.

SGLang must not be imported while it discovers plugins, so the class is created when SGLang looks it up by name.
"""

from __future__ import annotations

import os
from typing import Any

from kt_runtime.errors import KtError
from kt_runtime.resident.memory import return_freed_memory
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.version import check_version

SYMBOLS = (
    "sglang.srt.platforms.cpu.CpuDeviceMixin",
    "sglang.srt.platforms.device_mixin.PlatformEnum",
    "sglang.srt.platforms.interface.PlatformCapabilities",
    "sglang.srt.platforms.interface.SRTPlatform",
)
ATTENTION_BACKEND = "kt_cpu"


def activate() -> str | None:
    """Name of the platform class, or None if CUDA is available. Raises SystemExit for another SGLang version."""
    import torch

    try:
        check_version()
    except KtError as error:
        raise SystemExit(f"kt-runtime: {error}") from error
    return None if torch.cuda.is_available() else "kt_runtime.sglang_patch.platform:CpuPlatform"


def install(hooks: Hooks) -> None:
    """Only sets an environment variable, so that a crash does not wait a minute for a GPU's core dump.

    SGLang finds `activate` by its entry point.
    """
    if hooks.on_cpu:
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "0")


def __getattr__(name: str) -> Any:
    if name != "CpuPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _platform_class()


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

        def get_dispatch_key_name(self) -> str:
            return "native"

    return CpuPlatform
