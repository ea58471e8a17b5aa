"""Checks that the run fits into memory and disk, before anything is made."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kt_runtime.bench.options import DTYPE_BYTES
from kt_runtime.bench.peer_place import CPU, place_here
from kt_runtime.bench.serve.adapters import adapter_bytes
from kt_runtime.bench.serve.plan import Case, Plan
from kt_runtime.bench.serve.server_side import settings
from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.memory.machine import available_cpu_bytes
from kt_runtime.serve.memory.plan import MemoryNeed, check_fits, format_bytes
from kt_runtime.serve.memory.server import plan_server
from kt_runtime.serve.models.checkpoint import BF16_BYTES, count_parameters
from kt_runtime.serve.models.presets import is_preset
from kt_runtime.serve.options.named import ServeOptions

PEER_BYTES = 2 << 30  # interpreter, torch, activations and KV of a peer
LOWER = {"KV cache": ("--prefill", "--streams"), "LoRA slots": ("--streams", "--rank")}  # this command's options


def check_memory(plan: Plan, cases: list[Case], config: Mapping[str, Any], dtype: str) -> None:
    """Raises InvalidValueError if the server, with its adapters, or a peer does not fit into the free memory."""
    options = ServeOptions(model=plan.model, **settings(plan, cases, dtype))
    memory, free_bytes = plan_server(options, config, plan.model)
    needs = [replace(need, lower=LOWER.get(need.what, ())) for need in memory.needs]
    count = plan.most_streams(cases, adapters=True)
    if count:
        size_bytes = count * adapter_bytes(config, plan.rank)
        needs.append(MemoryNeed(f"{count} loaded adapters", "cpu", size_bytes, ("--streams", "--rank")))
    check_fits(replace(memory, needs=tuple(needs)), free_bytes)
    if plan.has_hugging_face:
        weights = count_parameters(config).total * DTYPE_BYTES[dtype]
        needed = weights + PEER_BYTES
        if place_here(config, weights).device == CPU and needed > (free := available_cpu_bytes()):
            raise InvalidValueError(
                f"Hugging Face needs {format_bytes(needed)} of memory for {plan.model} in {dtype}, "
                f"{format_bytes(free)} are free; leave it out with --no-hugging-face"
            )


def check_disk(plan: Plan, cases: list[Case], config: Mapping[str, Any]) -> None:
    """Raises InvalidValueError if the checkpoint, the GGUF file and the adapters' versions do not fit into the
    directory for temporary files."""
    directory = Path(tempfile.gettempdir())
    copies = int(is_preset(plan.model)) + int(plan.peer is not None or plan.gguf is not None)
    copies += int(plan.gguf is not None)  # in bf16, and quantized, which is smaller
    needed = copies * count_parameters(config).total * BF16_BYTES
    # One more for the directory that is being loaded.
    needed += (1 + plan.most_streams(cases, adapters=True)) * adapter_bytes(config, plan.rank)
    if needed > (free := shutil.disk_usage(directory).free):
        raise InvalidValueError(
            f"{directory} has {format_bytes(free)} free, the files of this run need {format_bytes(needed)}; set TMPDIR "
            "to another directory, or take fewer --streams or --no-adapters"
        )
