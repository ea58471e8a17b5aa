"""The whole run, and its JSON."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from kt_runtime import __version__
from kt_runtime.bench.scale.decoding import measure_ranks
from kt_runtime.bench.scale.plan import BAR_MS, Plan
from kt_runtime.bench.scale.replicas import Replicas
from kt_runtime.bench.swap.plan import size_of
from kt_runtime.bench.train.model import checkpoint, faster_dtype
from kt_runtime.bench.train.plan import Plan as TrainPlan
from kt_runtime.cli.interrupts import uninterrupted
from kt_runtime.cli.machine import cpu_facts
from kt_runtime.cli.server_process import server

SHOWN_FAILURES = 10


def run(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    dtype, cpu = plan.dtype or faster_dtype(), cpu_facts()
    result: dict[str, Any] = {
        "machine": {"cpu": cpu["model"], "processors": cpu["usable_processors"], "kt_runtime": __version__},
        "scale": plan.facts() | {"dtype": dtype},
    }
    with uninterrupted() as acting, tempfile.TemporaryDirectory(prefix="kt-runtime-bench-") as root, acting():
        if plan.replicas:
            facts, measured = _measure_replicas(plan, dtype, Path(root), say)
            result["scale"] |= facts
            result |= measured
        if plan.ranks:
            directory = Path(root) / "ranks"
            directory.mkdir()
            result["ranks"] = measure_ranks(plan, dtype, directory, say)
    return result


def _measure_replicas(
    plan: Plan, dtype: str, directory: Path, say: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts of the adapters, and what was measured."""
    say(f"the checkpoint of {plan.model}")
    model = checkpoint(TrainPlan(model=plan.model, layers=plan.layers), directory)
    config = json.loads((model / "config.json").read_text())
    size = size_of(plan.size, config)
    (directory / "registry").mkdir()
    with contextlib.ExitStack() as running:
        apis = []
        for number in range(plan.replicas):
            say(f"starting server {number + 1} of {plan.replicas} in {dtype}")
            options = _options(plan, dtype, size.rank, directory, number)
            apis.append(running.enter_context(server(str(model), options, directory / f"server-{number}.log")))
        replicas = Replicas(plan, apis, config, size, directory)
        found = replicas.rounds(say)
    last = [max(each.first_token_ms) for each in found]
    return {"adapter_bytes": size.num_bytes, "rank": size.rank}, {
        "rounds": [{"publish_ms": each.publish_ms, "first_token_ms": each.first_token_ms} for each in found],
        "last_first_token_ms": median(last),
        "worst_last_first_token_ms": max(last),
        "bar_ms": BAR_MS,
        "within_bar": max(last) <= BAR_MS,
        "requests": replicas.num_requests,
        "requests_failed": len(replicas.failures),
        "failures": replicas.failures[:SHOWN_FAILURES],
    }


def _options(plan: Plan, dtype: str, rank: int, directory: Path, number: int) -> list[str]:
    """The servers share the processors of this machine."""
    threads = max(1, len(os.sched_getaffinity(0)) // plan.replicas)
    tokens = 1024 + 64 * plan.streams
    options = [
        "--dtype",
        dtype,
        "--context-tokens",
        "512",
        "--max-total-tokens",
        str(tokens),
        "--finetuning-dir",
        "off",
    ]
    options += ["--max-lora-rank", str(rank), "--lora-slots", "4", "--expert-threads", str(threads)]
    options += ["--max-running-requests", str(plan.streams + 2), "--session-memory", "64MiB"]
    return [
        *options,
        "--adapter-dir",
        str(directory / f"adapters-{number}"),
        "--registry",
        str(directory / "registry"),
    ]
