"""The whole run, and the JSON that docs/bench.md describes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kt_runtime import __version__
from kt_runtime.bench.interfere import load
from kt_runtime.bench.interfere.figures import (
    IDLE,
    TRAINING,
    WHOLE_CALLS,
    Targets,
    Trained,
    Window,
    p99_per_token,
    plain_share,
    ratios,
    row_of,
    targets_of,
    tokens_per_s,
)
from kt_runtime.bench.interfere.plan import ANSWER_RANGE, HALF, PROMPT_RANGE, Plan, burst, poisson
from kt_runtime.bench.interfere.trainer import Moment, moment, training
from kt_runtime.bench.train.model import checkpoint, faster_dtype, vocabulary
from kt_runtime.bench.train.plan import Plan as TrainPlan
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.interrupts import uninterrupted
from kt_runtime.cli.machine import cpu_facts
from kt_runtime.cli.server_process import server

TIMEOUT_S = 900.0
LEAST_STEPS = 3
NO_TARGETS = {"tpot_target_ms": None, "ttft_target_ms": None, "schedule": "slices"}


def run(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    with uninterrupted() as acting, tempfile.TemporaryDirectory(prefix="kt-runtime-bench-") as root, acting():
        directory = Path(root)
        say(f"the checkpoint of {plan.model}")
        model = checkpoint(TrainPlan(model=plan.model, layers=plan.layers), directory)
        dtype = plan.dtype or faster_dtype()
        say(f"starting a server in {dtype}")
        with server(str(model), _options(plan, dtype, directory), directory / "server.log") as api:
            found = _Bench(plan, api, vocabulary(model), say).result()
    cpu = cpu_facts()
    machine = {"cpu": cpu["model"], "processors": cpu["usable_processors"], "kt_runtime": __version__}
    return {"machine": machine, "interfere": plan.facts() | {"dtype": dtype}} | found


def _options(plan: Plan, dtype: str, directory: Path) -> list[str]:
    longest = PROMPT_RANGE[1] + ANSWER_RANGE[1] + 64
    options = ["--dtype", dtype, "--context-tokens", str(plan.context_tokens), "--max-lora-rank", str(plan.rank)]
    options += ["--max-total-tokens", str(plan.concurrency * longest), "--lora-slots", "2"]
    options += ["--max-running-requests", str(plan.concurrency), "--train-share", str(plan.train_share)]
    return [*options, "--adapter-dir", str(directory / "adapters")]


class _Bench:
    """The measurements on a running server, in an order in which each has what it needs of those before."""

    def __init__(self, plan: Plan, api: ServerAPI, vocabulary: int, say: Callable[[str], None]) -> None:
        self._plan, self._api, self._vocabulary, self._say = plan, api, vocabulary, say
        self._step_tokens = plan.sequences * plan.tokens
        self._num_windows = 0

    def result(self) -> dict[str, Any]:
        plan = self._plan
        self._settings(NO_TARGETS)
        capacity = self._capacity()
        self._warm_up(capacity)
        # Twice, and the faster counts: what disturbs a window without training would make the targets lax.
        first = min((self._window(HALF, IDLE, capacity) for _ in range(2)), key=p99_per_token)
        windows = [first, *(self._window(load_, IDLE, capacity) for load_ in plan.all_loads if load_ != HALF)]
        targets = targets_of(windows[0], plan.tpot_target_ms, plan.ttft_target_ms)
        self._say(f"targets: {targets.tpot_ms:.1f} ms per output token, {targets.ttft_ms:.0f} ms to the first")
        stated = {"tpot_target_ms": targets.tpot_ms, "ttft_target_ms": targets.ttft_ms}
        alone, with_targets = self._alone({"without targets": NO_TARGETS, "with targets": stated})
        self._settings(stated)
        windows += [self._window(load_, TRAINING, capacity) for load_ in plan.all_loads]
        kept = next(each for each in windows if each.load == HALF and each.mode == TRAINING)
        share = plain_share(kept, self._step_tokens, alone)
        self._settings(NO_TARGETS | {"schedule": "whole_calls", "train_share": share})
        windows.append(self._window(HALF, WHOLE_CALLS, capacity))
        return self._figures(windows, targets, capacity, alone, with_targets)

    def _figures(
        self, windows: list[Window], targets: Targets, capacity: float, alone: float, with_targets: float
    ) -> dict[str, Any]:
        rows = [row_of(window, targets, self._step_tokens, alone) for window in windows]
        return ratios(rows, self._plan.seconds, alone, with_targets) | {
            "capacity_requests_per_s": capacity,
            "tpot_target_ms": targets.tpot_ms,
            "ttft_target_ms": targets.ttft_ms,
            "training_alone_tokens_per_s": alone,
            "rows": rows,
        }

    def _settings(self, changes: dict[str, Any]) -> None:
        self._api.patch("/kt/settings", changes)

    def _capacity(self) -> float:
        """Requests a second where there are always some waiting: the first burst warms up."""
        requests = burst(self._plan, self._vocabulary)
        load.answers(self._api.url, requests, TIMEOUT_S)
        requests = burst(replace(self._plan, seed=self._plan.seed + 1), self._vocabulary)
        began = time.perf_counter()
        load.answers(self._api.url, requests, TIMEOUT_S)
        rate = len(requests) / (time.perf_counter() - began)
        self._say(f"capacity: {rate:.2f} requests/s")
        return rate

    def _warm_up(self, capacity: float) -> None:
        """Half load with other requests than the windows', uncounted: batches of every size, a full prefix cache, and a
        training step meanwhile. A server's first seconds are slow, and would make the targets lax."""
        plan = replace(self._plan, seed=self._plan.seed + 3)
        requests = poisson(plan, HALF * capacity, plan.warm_up_seconds, self._vocabulary)
        load.answers(self._api.url, requests, TIMEOUT_S)
        with training(self._api, plan, self._vocabulary):
            load.answers(self._api.url, requests[: plan.concurrency], TIMEOUT_S)

    def _alone(self, settings: Mapping[str, dict[str, Any]]) -> list[float]:
        """Training's tokens/s with each of the `settings`: the medians of rounds in turn, since the machine's own speed
        changes from one minute to the next."""
        rates: dict[str, list[float]] = {how: [] for how in settings}
        for _ in range(self._plan.alone_rounds):
            for how, changes in settings.items():
                self._settings(changes)
                rates[how].append(self._alone_rate())
        for how, found in rates.items():
            self._say(f"training alone, {how}: {', '.join(f'{rate:.0f}' for rate in found)} tokens/s")
        return [statistics.median(found) for found in rates.values()]

    def _alone_rate(self) -> float:
        with training(self._api, self._plan, self._vocabulary) as trainer:
            time.sleep(self._plan.alone_seconds)
            trainer.wait_for_steps(LEAST_STEPS)
            rate = tokens_per_s([end.at_s for end in trainer.ends], self._step_tokens)
        assert rate is not None
        return rate

    def _window(self, load_: float, mode: str, capacity: float) -> Window:
        seconds, rate = self._plan.seconds_of(load_), load_ * capacity
        self._num_windows += 1
        requests = poisson(self._plan, rate, seconds, self._vocabulary, self._num_windows)
        if mode == IDLE:
            began = moment(self._api)
            found = load.answers(self._api.url, requests, TIMEOUT_S)
            ended, trained = moment(self._api), None
        else:
            with training(self._api, self._plan, self._vocabulary) as trainer:
                began = trainer.ends[-1]
                found = load.answers(self._api.url, requests, TIMEOUT_S)
                now = moment(self._api) if mode == TRAINING else None
            ended = now or trainer.ends[-1]  # while a whole call runs, the server answers nothing
            trained = trained_in(trainer.ends, began, ended)
        last = max(answer.events[-1][0] for answer in found)
        busy = (ended.serving_s - began.serving_s) / (last - began.at_s)
        window = Window(load_, mode, rate, seconds, found, min(1.0, busy), trained)
        self._say(f"load {load_:g}, {mode}: {len(found)} requests, engine busy with them {100 * busy:.0f} %")
        return window


def trained_in(ends: Sequence[Moment], began: Moment, ended: Moment) -> Trained:
    """`ends`: of the training steps, the first before `began`. What a step takes is measured between whole steps, so
    the steps that the window cuts count in part."""
    seconds, slices_s = ended.at_s - began.at_s, ended.training_s - began.training_s
    within = [end for end in ends if end.at_s <= ended.at_s]
    step_s = (within[-1].training_s - within[0].training_s) / (len(within) - 1) if len(within) > 1 else None
    return Trained(seconds, slices_s, step_s)
