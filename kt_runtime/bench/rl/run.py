"""The whole run, and the JSON that docs/bench.md describes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from kt_runtime import __version__
from kt_runtime.bench.rl.plan import Plan
from kt_runtime.bench.rl.server_side import PARTS, Measured, measure
from kt_runtime.bench.train.model import checkpoint, faster_dtype, vocabulary
from kt_runtime.bench.train.plan import Plan as TrainPlan
from kt_runtime.cli.interrupts import uninterrupted
from kt_runtime.cli.machine import cpu_facts


def run(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the JSON that docs/bench.md describes."""
    with uninterrupted() as acting, tempfile.TemporaryDirectory(prefix="kt-runtime-bench-") as root, acting():
        directory = Path(root)
        say(f"the checkpoint of {plan.model}")
        model = checkpoint(TrainPlan(model=plan.model, layers=plan.layers), directory)
        dtype = plan.dtype or faster_dtype()
        found = measure(plan, model, dtype, vocabulary(model), directory, say)
    cpu = cpu_facts()
    machine = {"cpu": cpu["model"], "processors": cpu["usable_processors"], "kt_runtime": __version__}
    return {"machine": machine, "rl": plan.facts() | {"dtype": dtype}} | figures(found)


def figures(found: Measured) -> dict[str, Any]:
    """Medians, with the least and all runs. `share`: a part's share of the time of all counted steps."""
    steps = [sum(parts.values()) for parts in found.steps]
    speedups = [
        group / single for group, single in zip(found.group_tokens_per_s, found.single_tokens_per_s, strict=True)
    ]
    return {
        "step_s": median(steps),
        "share": {name: sum(parts[name] for parts in found.steps) / sum(steps) for name in PARTS},
        "publish_to_first_token_ms": median(found.first_token_ms),
        "group_speedup": median(speedups),
        "step_s_min": min(steps),
        "publish_to_first_token_ms_min": min(found.first_token_ms),
        "publish_ms": median(found.publish_ms),
        "decode_step_ms": 1e3 / median(found.single_tokens_per_s),
        "single_tokens_per_s": median(found.single_tokens_per_s),
        "group_tokens_per_s": median(found.group_tokens_per_s),
        "largest_k3": found.largest_k3,
        "runs": {
            "step_s": steps,
            "publish_to_first_token_ms": found.first_token_ms,
            "group_speedup": speedups,
        },
    }
