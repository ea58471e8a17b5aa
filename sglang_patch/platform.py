"""SGLang on a machine without a GPU: the entry point `sglang.srt.platforms`.

Symbols: `sglang.srt.platforms.cpu.CpuDeviceMixin`, `.interface.SRTPlatform` (SGLang 0.5.23). Reason: the wheel's own
CPU platform needs its kernel library, which needs the CUDA driver; an out-of-tree platform with dispatch key `native`
takes the torch implementations instead. Where CUDA is available, SGLang keeps its own platform.

SGLang must not be imported while it discovers its plugins, so the class is built when SGLang asks for it by name.
"""

from __future__ import annotations

import os
from typing import Any

from kt_runtime.errors import KtError
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
    """Name of the platform class, or None where CUDA is available. Ends the process with another SGLang version."""
    import torch

    try:
        check_version()
    except KtError as error:
        raise SystemExit(f"kt-runtime: {error}") from error
    return None if torch.cuda.is_available() else "kt_runtime.sglang_patch.platform:CpuPlatform"


def install(hooks: Hooks) -> None:
    """SGLang finds `activate` by its entry point. A crash must not wait a minute for a GPU's core dump."""
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
            # SGLang has already turned "none given" into its AMX backend, which needs the kernel library.
            if server_args.attention_backend in (None, "intel_amx"):
                server_args.attention_backend = ATTENTION_BACKEND

        def get_default_attention_backend(self) -> str:
            return ATTENTION_BACKEND

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

        def get_dispatch_key_name(self) -> str:
            return "native"

    return CpuPlatform
