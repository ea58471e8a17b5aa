"""The whole run: files first, while the machine is otherwise idle, then the server."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from kt_runtime import __version__
from kt_runtime.bench.cache import bandwidth
from kt_runtime.bench.cache.first_token import FirstToken
from kt_runtime.bench.cache.plan import Plan
from kt_runtime.bench.cache.system_cache import file_system
from kt_runtime.bench.options import DTYPE_BYTES
from kt_runtime.bench.train.model import checkpoint, faster_dtype
from kt_runtime.bench.train.plan import Plan as TrainPlan
from kt_runtime.cli.interrupts import uninterrupted
from kt_runtime.cli.machine import cpu_facts
from kt_runtime.serve.memory.plan import cached_numbers_per_token


def run(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the JSON that docs/bench.md describes."""
    with (
        uninterrupted() as acting,
        tempfile.TemporaryDirectory(prefix="kt-runtime-bench-", dir=plan.directory) as root,
        acting(),
    ):
        directory = Path(root)
        say(f"the checkpoint of {plan.model}")
        model = checkpoint(TrainPlan(model=plan.model), directory)
        config = json.loads((model / "config.json").read_text())
        dtype = plan.dtype or faster_dtype()
        token_bytes = cached_numbers_per_token(config) * DTYPE_BYTES[dtype]
        os.sync()  # keeps pending writes of the checkpoint out of the measurement
        files = bandwidth.measure(plan.page_tokens * token_bytes, plan.bandwidth_bytes, plan.rounds, directory, say)
        answers = None
        if plan.with_server:
            answers = FirstToken(plan, model, dtype, token_bytes, int(config["vocab_size"]), directory)
            answers.measure(say)
        system = file_system(directory)
    cpu = cpu_facts()
    return {
        "machine": {
            "cpu": cpu["model"],
            "processors": cpu["usable_processors"],
            "file_system": system,
            "kt_runtime": __version__,
        },
        "cache": {
            "model": plan.model,
            "dtype": dtype,
            "tokens": plan.tokens,
            "page_tokens": plan.page_tokens,
            "token_bytes": token_bytes,
            "rounds": plan.rounds,
        },
        **_first_tokens(answers),
        "disk_read_ratio": files.ratio("read"),
        "disk_write_ratio": files.ratio("write"),
        "disk_read_ratio_best": files.best_ratio("read"),
        "disk_write_ratio_best": files.best_ratio("write"),
        "disk_read_ratio_warm": files.ratio("read_warm"),
        "files": files.as_json(),
    }


def _first_tokens(measured: FirstToken | None) -> dict[str, Any]:
    names = ("ttft_ms", "ttft_ms_min", "ttft_ms_samples", "cold_to_disk", "cold_to_disk_after_restart")
    if measured is None:
        return dict.fromkeys((*names, "cached_shares", "different_answers"))
    samples = measured.samples_ms
    middle = {source: median(each) for source, each in samples.items()}
    values = (
        middle,
        {source: min(each) for source, each in samples.items()},
        samples,
        middle["cold"] / middle["disk"],
        middle["cold"] / middle["disk_after_restart"],
        measured.cached_shares,
        measured.different_answers(),
    )
    return dict(zip((*names, "cached_shares", "different_answers"), values, strict=True))
