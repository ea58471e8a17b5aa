"""The last module that the fork server imports (system/forked_server.py): garbage collection leaves what it has so far.

A server collects before it starts its processes. In a fork, each object that a collection visits costs a copy of the
page of memory that the object lies in: of two million imported objects that was a third of a server's start.

What a server's processes import once they run is imported first: 0.09 s of the processor in each server. So are the
groups of entry points that they read (`uncollected_imports`).

prometheus_client, 0.03 s in each process of a server, chooses its kind of values when it is imported: those that
processes share, where a variable names their directory. The directory itself is looked up when a process makes a value,
and `kt-runtime serve` names its own before.
"""

import contextlib
import gc
import importlib
import os
import pkgutil
from importlib import metadata

from kt_runtime.resident.memory import return_freed_memory
from kt_runtime.sglang_patch.freezing import freeze_all

PACKAGES = (
    *("kt_runtime.serve.hosts", "kt_runtime.serve.http", "kt_runtime.sglang_patch.frontend"),
    *("sglang.srt.arg_groups", "sglang.srt.dllm.algorithm", "sglang.srt.distributed.device_communicators"),
    *("sglang.srt.constrained.torch_ops", "sglang.srt.lora.torch_ops"),
)
MODULES = (
    *("kt_runtime.serve.memory.sizes", "kt_runtime.serve.requests.checks.validation_errors", "re2"),
    *("kt_runtime.sglang_patch.grammar.limits", "sglang.srt.constrained.xgrammar_backend"),
    *("sglang.srt.lora.backend.torch_backend", "sglang.srt.mem_cache.prefill_budget"),
    *("sglang.srt.mem_cache.rust_tree_core.adapter", "sglang.srt.layers.attention.qsa.config"),
    *("smg_grpc_servicer.sglang.plugin", "smg_grpc_servicer.sglang.zmq_plugin"),
    *("transformers.models.deepseek_v3.modeling_deepseek_v3", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
    *("uvicorn.lifespan.on", "uvicorn.loops.uvloop", "uvicorn.protocols.http.h11_impl"),
)
GROUPS = ("sglang.srt.platforms", "sglang.srt.plugins", "torch.distributed.backends")
of_packages = [
    found.name
    for package in PACKAGES
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}.")
]
for name in (*of_packages, *MODULES):
    with contextlib.suppress(ImportError):  # what needs a GPU
        importlib.import_module(name)
for group in GROUPS:
    metadata.entry_points(group=group)
os.environ["PROMETHEUS_MULTIPROC_DIR"] = ""
importlib.import_module("prometheus_client")
del os.environ["PROMETHEUS_MULTIPROC_DIR"]

freeze_all()
return_freed_memory()  # else a server's leaks would fill it, and its memory would not grow (faults/test_soak.py)
gc.enable()
