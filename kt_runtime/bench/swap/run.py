"""The whole run, and the JSON that docs/bench.md describes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kt_runtime import __version__
from kt_runtime.bench.swap.figures import result_of, row_of
from kt_runtime.bench.swap.plan import LARGE_BYTES, Plan, Size, bytes_of, size_of
from kt_runtime.bench.swap.server_side import MANY_STREAM_TOKENS, STREAM_TOKENS, SwapBench
from kt_runtime.bench.swap.streams import PROMPT_TOKENS
from kt_runtime.bench.train.model import checkpoint, faster_dtype
from kt_runtime.bench.train.plan import Plan as TrainPlan
from kt_runtime.cli.interrupts import uninterrupted
from kt_runtime.cli.machine import cpu_facts
from kt_runtime.cli.server_process import server

LORA_SLOTS = 4


def run(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    with uninterrupted() as acting, tempfile.TemporaryDirectory(prefix="kt-runtime-bench-") as root, acting():
        directory = Path(root)
        say(f"the checkpoint of {plan.model}")
        model = checkpoint(TrainPlan(model=plan.model, layers=plan.layers), directory)
        config = json.loads((model / "config.json").read_text())
        dtype = plan.dtype or faster_dtype()
        sizes = [size_of(name, config) for name in plan.sizes]
        small = [each for each in sizes if bytes_of(each.name) < LARGE_BYTES]
        large = [each for each in sizes if bytes_of(each.name) >= LARGE_BYTES]
        say(f"starting a server in {dtype}")
        with server(str(model), _options(plan, dtype, small, directory), directory / "server.log") as api:
            bench = SwapBench(plan, api, config, directory, say)
            found = [bench.control(), *bench.sessions(), *bench.loads(small), bench.swaps()]
            rss_bytes, failures = bench.cycles(), bench.failures
        if large:
            say(f"starting a server for adapters of {', '.join(each.name for each in large)}")
            with server(str(model), _options(plan, dtype, large, directory), directory / "server.log") as api:
                bench = SwapBench(plan, api, config, directory, say)
                found += bench.loads(large)
                failures = failures + bench.failures
    cpu = cpu_facts()
    machine = {"cpu": cpu["model"], "processors": cpu["usable_processors"], "kt_runtime": __version__}
    result = result_of([row_of(each) for each in found], rss_bytes, len(failures))
    return {"machine": machine, "swap": plan.facts() | {"dtype": dtype}} | result | {"failures": failures[:10]}


def _options(plan: Plan, dtype: str, sizes: Sequence[Size], directory: Path) -> list[str]:
    """Options of a server for these sizes."""
    highest = max([*plan.ranks, *(each.rank for each in sizes)])
    longest = max(plan.streams * (STREAM_TOKENS + PROMPT_TOKENS), plan.many_streams * (MANY_STREAM_TOKENS + 16))
    options = ["--dtype", dtype, "--context-tokens", str(STREAM_TOKENS + 64), "--max-lora-rank", str(highest)]
    options += ["--max-total-tokens", str(longest + 4096), "--finetuning-dir", "off"]
    if any(bytes_of(each.name) >= LARGE_BYTES for each in sizes):
        options += ["--lora-memory", str(2 * max(each.num_bytes for each in sizes)), "--session-memory", "64MiB"]
    else:
        options += ["--lora-slots", str(LORA_SLOTS)]
    options += ["--max-running-requests", str(max(plan.many_streams, plan.streams) + 1)]
    return [*options, "--adapter-dir", str(directory / "adapters")]
