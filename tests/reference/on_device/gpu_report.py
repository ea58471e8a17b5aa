"""A small report of `kt-runtime bench gpu`, from figures that were made up."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kt_runtime.bench.gpu.bars import bars
from kt_runtime.bench.gpu.limits import GpuLimits
from kt_runtime.bench.gpu.needs import Needs
from kt_runtime.bench.gpu.rows import Row
from kt_runtime.bench.gpu.settings import KT_RUNTIME, ON_CPU, SGLANG, STREAMS_EXPERTS, hot_name

MODEL = "Qwen3-30B-A3B"
LIMITS = GpuLimits(
    dram=100e9, cpu_arithmetic=2e12, to_device=20e9, to_host=19e9, device_memory=1e12, device_arithmetic=100e12
)


def rows() -> list[Row]:
    """Decode at 0.7 of DRAM's limit, and at half of SGLang's rate; prefill of 4,096 tokens streamed, four times the
    CPU's rate, at 0.8 of the bus; training failed."""
    decode = Needs(dram=0.7 * LIMITS.dram / 100, device_memory=1e9)
    prefill = Needs(to_device=0.8 * LIMITS.to_device * 4096 / 8000)
    return [
        Row(MODEL, KT_RUNTIME, ON_CPU, "decode", 1, [90.0, 110.0, 100.0], decode, device_bytes=8 << 30),
        Row(MODEL, KT_RUNTIME, ON_CPU, "prefill", 4096, [2000.0], Needs(dram=1e9)),
        Row(MODEL, KT_RUNTIME, STREAMS_EXPERTS, "prefill", 4096, [8000.0], prefill),
        Row(MODEL, KT_RUNTIME, hot_name(16), "decode", 1, [150.0], decode, resident=16),
        Row(MODEL, SGLANG, "16 paged experts a layer", "decode", 1, [300.0], Needs(to_device=1e6), resident=16),
        Row(MODEL, KT_RUNTIME, ON_CPU, "training", 4096, problem="the GPU has gone"),
    ]


def report() -> dict[str, Any]:
    found = [row.as_json(LIMITS) for row in rows()]
    machine = {"cpu": "a CPU", "processors": 16, "kt_runtime": "0.1.0", "gpu": "a GPU", "gpu_bytes": 80 * 10**9}
    settings = {"prompt_tokens": 128, "new_tokens": 64, "runs": 3, "sequences": 8, "tokens": 512}
    return {
        "machine": machine | {"driver": "580.65", "torch": "2.14.1", "limits": asdict(LIMITS)},
        "gpu": settings | {"microbatch_tokens": 4096, "dtype": "bfloat16", "layers": {MODEL: 48}},
        "peers": {MODEL: {"hugging_face": {"torch": "2.14.1", "device": "cpu", "problem": None}}},
        "rows": found,
        "bars": [bar.as_json() for bar in bars(MODEL, found)],
    }
