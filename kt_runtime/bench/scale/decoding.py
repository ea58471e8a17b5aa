"""Decoding on ranks of one core each, compared with one process on as many cores; over HTTP, on the same prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from kt_runtime.bench.scale.memory import BASE_MODEL, measure_memory
from kt_runtime.bench.scale.plan import RANKS_BAR, Plan
from kt_runtime.bench.serve.no_step import same_share
from kt_runtime.bench.serve.plan import Case
from kt_runtime.bench.serve.plan import Plan as ServePlan
from kt_runtime.bench.serve.rows import Measured
from kt_runtime.bench.serve.server_side import ServerSide, Transcript
from kt_runtime.bench.train.model import checkpoint
from kt_runtime.bench.train.plan import Plan as TrainPlan
from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.models.checkpoint_files import read_config
from kt_runtime.sglang_patch.ranks.processors import cores_of

ONE, RANKS = "one process", "ranks"


def measure_ranks(plan: Plan, dtype: str, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """One server after the other, each limited to the first `plan.ranks` cores. Raises InvalidValueError if there are
    fewer."""
    processors = first_cores(plan.ranks)
    say(f"the checkpoint of {plan.rank_model}")
    model = checkpoint(TrainPlan(model=plan.rank_model), directory)
    config = read_config(model)
    serve = ServePlan(model=plan.rank_model, prefill=(), streams=plan.rank_streams, runs=plan.rank_runs, dtype=dtype)
    cases = [Case("decode", streams) for streams in sorted(set(plan.rank_streams))]
    found = {}
    with limited_to(processors):
        for name, options in (
            (ONE, ["--expert-threads", str(plan.ranks)]),
            (RANKS, ["--tp-size", str(plan.ranks), "--expert-threads", "1"]),
        ):
            side = ServerSide(serve, cases, config, dtype, partial(_say_of, say, name), extra=options)
            place = directory / name.replace(" ", "-")
            place.mkdir()
            found[name] = side.measure(model, place)
        place = directory / "memory"
        place.mkdir()
        base = checkpoint(TrainPlan(model=BASE_MODEL), place)
        memory = measure_memory(model, base, plan.ranks, dtype, place, say)
    rows = [
        row_of(case, *(found[name].measured[case] for name in (RANKS, ONE)))
        for case in cases
        if all(case in each.measured for each in found.values())
    ]
    return {
        "ranks": plan.ranks,
        "model": plan.rank_model,
        "prompt_tokens": serve.prompt_tokens,
        "new_tokens": serve.new_tokens,
        "steps": {name: each.step for name, each in found.items()},
        "processes": _memory(found[RANKS].last_status),
        "memory": memory,
        "rows": rows,
        "problems": [str(problem) for each in found.values() for problem in each.problems.values()],
        "bar": RANKS_BAR,
        "within_bar": len(rows) == len(cases) and all(row["ratio"] >= RANKS_BAR for row in rows),
    }


def _say_of(say: Callable[[str], None], server: str, line: str) -> None:
    say(f"{server}: {line}")


def row_of(case: Case, ranks: tuple[Measured, Transcript], one: tuple[Measured, Transcript]) -> dict[str, Any]:
    """`ratio`: the ranks' rate over that of one process. `same_tokens`: share of equal tokens, place by place."""
    ours, theirs = ranks[0], one[0]
    return {
        "streams": case.size,
        "tokens_per_s": ours.tokens_per_s,
        "tokens_per_s_runs": ours.rates,
        "one_process_tokens_per_s": theirs.tokens_per_s,
        "one_process_tokens_per_s_runs": theirs.rates,
        "ratio": ours.tokens_per_s / theirs.tokens_per_s,
        "step_ms": _step_ms(ours),
        "one_process_step_ms": _step_ms(theirs),
        "same_tokens": same_share(ranks[1], one[1]),
    }


def first_cores(count: int) -> list[int]:
    """Processors of the first `count` cores that this process may use."""
    cores = cores_of(sorted(os.sched_getaffinity(0)))
    if len(cores) < count:
        raise InvalidValueError(f"--ranks is {count}: this process may use {len(cores)} cores; each rank needs one")
    return [processor for core in cores[:count] for processor in core]


@contextmanager
def limited_to(processors: list[int]) -> Iterator[None]:
    """What is started meanwhile runs there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _memory(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = ("rank", "dense_bytes", "expert_bytes", "peak_bytes")
    return [{name: each[name] for name in names} for each in status.get("ranks", [])]


def _step_ms(measured: Measured) -> float | None:
    """Median milliseconds of the native step for a token of every stream; None: it did not compute all tokens."""
    times = [1e3 * each.step for each in measured.token_times]
    return median(times) if times else None
