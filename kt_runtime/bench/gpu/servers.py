"""One model's servers, one after the other, each measured over HTTP by the clients of `bench serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kt_runtime.bench.gpu.needs import ExpertPlace, Needs, decode_needs, prefill_needs, training_needs
from kt_runtime.bench.gpu.plan import DTYPE, Plan
from kt_runtime.bench.gpu.rows import Row
from kt_runtime.bench.gpu.settings import SGLANG, TRAINING, Setting
from kt_runtime.bench.gpu.stock import StockSide
from kt_runtime.bench.serve.peers import one_line
from kt_runtime.bench.serve.plan import DECODE, Case
from kt_runtime.bench.serve.server_side import Measurements, ServerSide
from kt_runtime.bench.serve.work import ModelWork
from kt_runtime.bench.train import server_side as training
from kt_runtime.bench.train.model import vocabulary
from kt_runtime.bench.train.plan import sequences_of
from kt_runtime.cli.interrupts import Say
from kt_runtime.device import memory
from kt_runtime.errors import KtError
from kt_runtime.serve.models.presets import Preset


class Servers:
    """`device`: the accelerator, whose memory is read before and during each server. `work`: of the model."""

    def __init__(self, plan: Plan, preset: Preset, work: ModelWork, device: torch.device, say: Say) -> None:
        self._plan, self._preset, self._work, self._device, self._say = plan, preset, work, device, say

    def rows(self, setting: Setting, model: Path, directory: Path) -> tuple[list[Row], Measurements]:
        """The setting's rows, serving first, and what its server measured. A server that fails leaves the cases that it
        has measured; the others' rows have the reason. `directory`: new, for the server's files."""
        directory.mkdir()
        side, problem = self._side(setting), None
        try:
            side.measure(model, directory)
        except (KtError, OSError) as error:
            problem = one_line(error)
            self._say(f"{self._preset.name}, {setting.name}: {problem}")
        rows = [self._row(setting, case, side, problem) for case in self._cases(setting)]
        if TRAINING in setting.kinds and self._plan.with_training:
            rows.append(self._training(setting, model, directory))
        return rows, side.result.measured

    def _side(self, setting: Setting) -> ServerSide:
        kind = StockSide if setting.engine == SGLANG else ServerSide
        return kind(
            self._plan.serving(self._preset.name),
            self._cases(setting),
            self._preset.config,
            DTYPE,
            self._say_of(setting),
            extra=setting.options,
            free_bytes=lambda: memory(self._device).free_bytes,
        )

    def _cases(self, setting: Setting) -> list[Case]:
        every = self._plan.serving(self._preset.name).cases(self._preset.config)
        return [case for case in every if case.kind in setting.kinds]

    def _row(self, setting: Setting, case: Case, side: ServerSide, problem: str | None) -> Row:
        found, status = side.result.measured.get(case), side.result.last_status
        place = place_in(setting.place, case, status)
        return Row(
            self._preset.name,
            setting.engine,
            setting.name,
            case.kind,
            case.size,
            found[0].rates if found else (),
            serving_needs(self._work, place, case, self._plan),
            setting.resident,
            place.hit_rate,
            threshold_of(status),
            side.result.device_bytes or None,
            side.result.problems.get(case) or (None if found else problem),
        )

    def _training(self, setting: Setting, model: Path, directory: Path) -> Row:
        plan = self._plan.training(self._preset.name)
        rates: list[float] = []
        problem = None
        try:
            place = directory / "training"
            place.mkdir()
            drawn = sequences_of(plan, vocabulary(model))
            (measured,) = training.measure(
                plan, model, DTYPE, drawn, place, self._say_of(setting), setting.options
            ).values()
            rates = [plan.step_tokens / seconds for seconds in measured.seconds]
        except (KtError, OSError) as error:
            problem = one_line(error)
        needs = training_needs(self._work, setting.place, plan.sequences, plan.tokens)
        name, engine = setting.name, setting.engine
        return Row(self._preset.name, engine, name, TRAINING, plan.step_tokens, rates, needs, problem=problem)

    def _say_of(self, setting: Setting) -> Say:
        return lambda line: self._say(f"{self._preset.name}, {setting.name}: {line}")


def hit_rate_of(status: Mapping[str, Any]) -> float | None:
    """Hit rate of hot experts in all decode steps, from GET /kt/status. None: no hot experts, or nothing counted."""
    hot = status.get("gpu_experts")
    return None if not hot or not hot["hits"] + hot["misses"] else float(hot["hit_rate"])


def threshold_of(status: Mapping[str, Any]) -> int | None:
    """The fewest tokens of a call whose experts stream; None: no call's do, or the server does not say."""
    streaming = status.get("expert_streaming")
    return streaming["threshold_tokens"] if streaming else None


def place_in(place: ExpertPlace, case: Case, status: Mapping[str, Any]) -> ExpertPlace:
    """Where the experts of `case` were computed, by what the server counted and measured (GET /kt/status)."""
    threshold = threshold_of(status)
    if place.experts == "streamed" and status and (threshold is None or case.size < threshold):
        return ExpertPlace("cpu")
    return replace(place, hit_rate=hit_rate_of(status))


def serving_needs(work: ModelWork, place: ExpertPlace, case: Case, plan: Plan) -> Needs:
    """What a prompt or a decode step needs."""
    if case.kind == DECODE:
        return decode_needs(work, place, case.size, plan.prompt_tokens + plan.new_tokens / 2)
    return prefill_needs(work, place, case.size)
