"""The entry point `sglang.srt.plugins`: SGLang calls `register` in every process that it starts.

Only the modules in `PATCHES` patch SGLang 0.5.23 in every process, one module per thing patched. Each module has a
docstring with symbol, version and reason, a tuple `SYMBOLS` of the dotted names that it touches, and `install(hooks)`.

SGLang catches every Exception of a plugin and continues without the plugin. An unpatched SGLang would load the routed
experts a second time, or answer wrongly. A failure here therefore raises SystemExit, which is not an Exception.
"""

from __future__ import annotations

import importlib

from kt_runtime.errors import KtError
from kt_runtime.sglang_patch.version import check_version

PATCHES = (
    *("signals", "freezing", "quantization", "platform", "cpu.attention", "cache.paging", "cpu.router"),
    *("cpu.linear", "cpu.norms", "cpu.moe", "cpu.weights", "cpu.packed", "cpu.step", "cpu.routes"),
    *("delta.attention", "delta.layers", "delta.lora"),
    *("gpu.hot", "gpu.streaming", "gpu.latent_attention"),
    *("models.gpt_oss", "models.llama4", "models.sparse_attention"),
    *("cpu.absorbed", "cpu.activation", "cpu.grouped_router", "cpu.logprobs", "cpu.seeds"),
    *("gpu.replays", "gpu.shared_experts", "gpu.lora_buffers"),
    *(
        "lora.pinned_memory",
        "lora.linear",
        "lora.kv_b",
        "lora.whole_queries",
        "lora.pool",
        "lora.slots",
        "lora.staging",
    ),
    *("lora.experts", "lora.install", "ranks.linear", "ranks.norms"),
    *("ranks.processors", "ranks.collectives", "ranks.meeting", "ranks.loops"),
    *("cache.host_pool", "cache.host_copies", "cache.page_hash", "cache.keys", "cache.namespace"),
    *("cache.prefetches", "cache.events", "cache.metrics"),
    *("faults.finite_rows", "faults.batches", "faults.intake", "faults.exact_aborts", "faults.refused_model"),
    *("grammar.stop_patterns", "grammar.backend", "grammar.ranks", "resident.latencies", "resident.turns", "warm_up"),
)
TOUCHED_OTHERWISE = (
    "hooks",
    "store",
    "resident.host",
    "gpu.experts",
    "lora.step",
    "ranks.group",
    "resident.members",
    "ranks.processes",
    "other_host",
    "frontend.http_server",
    "frontend.tokenizing",
    "frontend.chat_logprobs",
    "arguments",
    "delta.states",
    "delta.step",
    "models.sparse_options",
    "faults.answers",
    "grammar.log",
    "resident.turn_metrics",
)
"""Modules that read or call SGLang without patching it in every process. `frontend.http_server` also lists the symbols
of the other modules in its folder, and `cache.events` lists those of `cache.backend`."""


def register() -> None:
    """Patches SGLang in this process. Raises SystemExit with the reason if SGLang can't be patched."""
    try:
        check_version()
        install_patches()
    except KtError as error:
        raise SystemExit(f"kt-runtime: {error}") from error


def install_patches() -> None:
    from kt_runtime.sglang_patch.hooks import Hooks

    hooks = Hooks.for_this_process()
    for name in PATCHES:
        patch_module(name).install(hooks)
    hooks.apply()


def symbols() -> dict[str, tuple[str, ...]]:
    """Maps each patch to the dotted names in SGLang that the patch touches. Does not import SGLang."""
    return {name: patch_module(name).SYMBOLS for name in (*PATCHES, *TOUCHED_OTHERWISE)}


def patch_module(name: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"kt_runtime.sglang_patch.{name}")
