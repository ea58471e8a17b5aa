"""`bench ranks`: one process against several ranks on this machine, both with all of its processors."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from kt_runtime import __version__
from kt_runtime.bench.options import check_dtype, check_number
from kt_runtime.bench.scale.traffic import sent_bytes
from kt_runtime.bench.swap.streams import FIRST_TOKEN
from kt_runtime.bench.train.model import checkpoint, faster_dtype
from kt_runtime.bench.train.plan import Plan as TrainPlan
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.interrupts import uninterrupted
from kt_runtime.cli.machine import cpu_facts, memory_node_facts
from kt_runtime.cli.server_process import server

MOST_RANKS = 64
PROMPT_TOKENS = 16
BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class RanksPlan:
    """`ranks`: of the second server; the first one is one process. `tokens`: decoded in a run. `runs`: that count."""

    model: str = "bench-qwen3-moe"
    layers: int | None = None
    ranks: int = 2
    tokens: int = 64
    runs: int = 3
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidValueError and UnknownNameError."""
        check_number("ranks", self.ranks, 2, MOST_RANKS)
        for name in ("tokens", "runs"):
            check_number(name, getattr(self, name))
        if self.layers is not None:
            check_number("layers", self.layers)
        check_dtype(self.dtype)


@dataclass(frozen=True)
class Decoding:
    """Of one stream: tokens per second of each run; processor seconds of a token, of each rank's process."""

    tokens_per_s: list[float]
    cpu_s: list[float]
    ranks: list[dict[str, Any]]

    @property
    def median_tokens_per_s(self) -> float:
        return median(self.tokens_per_s)


def run(plan: RanksPlan, say: Callable[[str], None]) -> dict[str, Any]:
    with uninterrupted() as acting, tempfile.TemporaryDirectory(prefix="kt-runtime-bench-") as root, acting():
        directory = Path(root)
        say(f"the checkpoint of {plan.model}")
        model = checkpoint(TrainPlan(model=plan.model, layers=plan.layers), directory)
        config, dtype = json.loads((model / "config.json").read_text()), plan.dtype or faster_dtype()
        found = {}
        for ranks in (1, plan.ranks):
            say(f"starting {'one process' if ranks == 1 else f'{ranks} ranks'} in {dtype}")
            options = [*_options(plan, dtype), *(("--tp-size", str(ranks)) if ranks > 1 else ())]
            options += ["--adapter-dir", str(directory / f"adapters-{ranks}")]
            with server(str(model), options, directory / f"server-{ranks}.log") as api:
                found[ranks] = decode(api, plan, say)
    cpu = cpu_facts()
    return {
        "machine": {
            "cpu": cpu["model"],
            "processors": cpu["usable_processors"],
            "memory_nodes": len(memory_node_facts()["nodes"]),
            "kt_runtime": __version__,
        },
        "ranks": {name: getattr(plan, name) for name in ("model", "layers", "ranks", "tokens", "runs")},
        **compared(found[1], found[plan.ranks], config, plan, dtype),
    }


def compared(
    one: Decoding, several: Decoding, config: Mapping[str, Any], plan: RanksPlan, dtype: str
) -> dict[str, Any]:
    """`sharding_needs_bytes`: what a rank has to send for a token (`traffic.py`)."""
    traffic = sent_bytes(config, num_ranks=plan.ranks, activation_bytes=BYTES[dtype])
    return {
        "dtype": dtype,
        "one_process": _row(one),
        "several_ranks": _row(several),
        "ratio": several.median_tokens_per_s / one.median_tokens_per_s,
        "sharding_needs_bytes": traffic.needed,
        "exchanges": traffic.exchanges,
    }


def decode(api: ServerAPI, plan: RanksPlan, say: Callable[[str], None]) -> Decoding:
    """The first run does not count."""
    rates: list[float] = []
    _tokens(api, plan.tokens, 0)
    before, status = _cpu_seconds(api), api.get("/kt/status")
    for number in range(1, plan.runs + 1):
        began = time.perf_counter()
        _tokens(api, plan.tokens, number)
        rates.append(plan.tokens / (time.perf_counter() - began))
        say(f"{rates[-1]:.1f} tokens/s")
    cpu = [(now - then) / (plan.runs * plan.tokens) for now, then in zip(_cpu_seconds(api), before, strict=True)]
    after = api.get("/kt/status")["ranks"]
    sent = [now["sent_bytes"] - then["sent_bytes"] for now, then in zip(after, status["ranks"], strict=True)]
    ranks = [
        {
            "rank": each["rank"],
            "waiting_share": each["waiting_share"],
            "exchange_bytes": bytes_ / plan.runs / plan.tokens,
        }
        for each, bytes_ in zip(after, sent, strict=True)
    ]
    return Decoding(rates, cpu, ranks)


def _tokens(api: ServerAPI, num_tokens: int, run_number: int) -> None:
    """A prompt of the run's own, so that none is found in the prefix cache."""
    prompt = [FIRST_TOKEN + (31 * run_number + place) % 500 for place in range(PROMPT_TOKENS)]
    sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    api.post("/generate", {"input_ids": prompt, "sampling_params": sampling})


def _cpu_seconds(api: ServerAPI) -> list[float]:
    """Of each rank's process; empty for one process, whose id the status does not have."""
    times = [psutil.Process(each["pid"]).cpu_times() for each in api.get("/kt/status")["ranks"]]
    return [each.user + each.system for each in times]


def _row(found: Decoding) -> dict[str, Any]:
    return {
        "tokens_per_s": found.tokens_per_s,
        "median_tokens_per_s": found.median_tokens_per_s,
        "cpu_ms_per_token": [1e3 * each for each in found.cpu_s],
        "ranks": found.ranks,
    }


def _options(plan: RanksPlan, dtype: str) -> list[str]:
    tokens = 2 * (plan.tokens + PROMPT_TOKENS) + 64
    return [
        *("--dtype", dtype, "--context-tokens", str(tokens), "--max-total-tokens", str(2 * tokens)),
        *("--max-running-requests", "2", "--max-lora-rank", "8", "--lora-slots", "2", "--finetuning-dir", "off"),
        *("--session-memory", "64MiB"),
    ]


def print_ranks(result: dict[str, Any]) -> None:
    from rich.table import Column, Table

    from kt_runtime.cli.console import console_of_width

    console = console_of_width(110)
    facts = result["ranks"]
    table = Table(
        "",
        *(Column(heading, justify="right") for heading in ("tokens/s", "CPU of a rank, ms", "waits", "exchanged, KB")),
        title=f"{facts['model']}, one stream, {result['dtype']}",
    )
    table.add_row("one process", f"{result['one_process']['median_tokens_per_s']:.1f}", "", "", "")
    several = result["several_ranks"]
    for each, cpu_ms in zip(several["ranks"], several["cpu_ms_per_token"], strict=True):
        rate = f"{several['median_tokens_per_s']:.1f}" if each["rank"] == 0 else ""
        waits, sent = f"{100 * each['waiting_share']:.0f} %", f"{each['exchange_bytes'] / 1e3:.1f}"
        table.add_row(f"rank {each['rank']} of {facts['ranks']}", rate, f"{cpu_ms:.1f}", waits, sent)
    console.print(table)
    console.print(
        f"{facts['ranks']} ranks decode at {result['ratio']:.2f} of one process's speed. A rank sends at least "
        f"{result['sharding_needs_bytes'] / 1e3:.1f} KB for a token, in {result['exchanges']} exchanges.",
        highlight=False,
    )
