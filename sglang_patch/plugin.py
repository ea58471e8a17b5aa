"""The entry point `sglang.srt.plugins`: SGLang calls `register` in every process that it starts.

Symbols of SGLang 0.5.23 are touched by the modules in `PATCHES` only, one per thing patched. Each has a docstring with
symbol, version and reason, a tuple `SYMBOLS` of the dotted names that it touches, and `install(hooks)`.

SGLang swallows every Exception of a plugin and goes on without it. Without our patches it would load the routed experts
a second time, or answer wrongly, so a failure here ends the process: SystemExit is not an Exception.
"""

from __future__ import annotations

import importlib

from kt_runtime.errors import KtError
from kt_runtime.sglang_patch.version import check_version

PATCHES = (
    *("signals", "platform", "attention", "paging", "router", "norms", "moe", "weights"),
    *("lora_pinned_memory", "lora_kv_b", "lora_pool", "lora_experts", "lora_install"),
    *("cache_host_pool", "cache_host_copies", "cache_page_hash", "cache_keys", "cache_namespace"),
    *("cache_events", "cache_metrics"),
    *("finite_rows", "fault_batches", "fault_intake", "exact_aborts", "stop_patterns"),
    *("grammar_backend", "turns", "warm_up"),
)
TOUCHED_OTHERWISE = ("host", "frontend", "tokenizing", "chat_logprobs", "arguments", "fault_answers", "grammar_log")
"""Modules that read or call SGLang without patching it in every process; `frontend` speaks for `frontend_*` too,
`cache_events` for `cache_backend`."""


def register() -> None:
    """Patches SGLang in this process. Ends the process, with the reason, where SGLang can't be patched."""
    try:
        check_version()
        install_patches()
    except KtError as error:
        raise SystemExit(f"kt-runtime: {error}") from error


def install_patches() -> None:
    import torch

    from kt_runtime.sglang_patch.hooks import Hooks

    hooks = Hooks(on_cpu=not torch.cuda.is_available())
    for name in PATCHES:
        patch_module(name).install(hooks)
    hooks.apply()


def symbols() -> dict[str, tuple[str, ...]]:
    """The dotted names of SGLang that each patch touches, by patch. Imports nothing of SGLang."""
    return {name: patch_module(name).SYMBOLS for name in (*PATCHES, *TOUCHED_OTHERWISE)}


def patch_module(name: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"kt_runtime.sglang_patch.{name}")
