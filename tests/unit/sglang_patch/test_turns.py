"""What training's turns read of SGLang's scheduler; that SGLang calls us at all is in tests/system."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kt_runtime.resident.pacing.budget import Load
from kt_runtime.resident.pacing.latencies import Latencies
from kt_runtime.sglang_patch import latencies
from kt_runtime.sglang_patch.host import SGLangHost
from kt_runtime.sglang_patch.turn_metrics import TurnMetrics
from kt_runtime.sglang_patch.warm_up import RID_PREFIX
from kt_runtime.wire.settings import Settings
from kt_runtime.wire.status import TrainingTurns


class Batch(SimpleNamespace):
    def batch_size(self) -> int:
        return int(self.size)


def batch(size: int, *, is_extend: bool = False, is_full: bool = False) -> Batch:
    return Batch(size=size, batch_is_full=is_full, forward_mode=SimpleNamespace(is_extend=lambda: is_extend))


def load(**scheduler: Any) -> Load:
    host = object.__new__(SGLangHost)
    fields: dict[str, Any] = {"waiting_queue": [], "chunked_req": None, "last_batch": None, "is_fully_idle": lambda: False}
    host._scheduler = SimpleNamespace(**(fields | scheduler))
    return host.load()


def test_what_has_its_first_token_decodes_and_what_has_none_waits() -> None:
    running = batch(3)
    assert load(running_batch=running, last_batch=running) == Load(3, 0, True)
    assert load(running_batch=running, last_batch=batch(2, is_extend=True)) == Load(5, 0, True)
    assert load(running_batch=running, waiting_queue=[1, 2]) == Load(3, 2, True)
    in_chunks = load(running_batch=running, last_batch=batch(1, is_extend=True), chunked_req=object())
    assert in_chunks == Load(3, 1, True)
    assert load(running_batch=batch(0), is_fully_idle=lambda: True) == Load(0, 0, False)


def test_what_finds_no_place_among_the_running_requests_does_not_hold_training_up() -> None:
    assert load(running_batch=batch(8, is_full=True), waiting_queue=[1, 2]) == Load(8, 0, True)


class Request(SimpleNamespace):
    def finished(self) -> bool:
        return bool(self.is_finished)


def request(rid: str = "r") -> Request:
    arrived = time.perf_counter() - 0.5
    return Request(rid=rid, output_ids=[], is_finished=False, time_stats=SimpleNamespace(wait_queue_entry_time=arrived))


def test_a_request_is_measured_once_when_it_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Latencies()
    monkeypatch.setattr(latencies, "measured", measured)
    ours, warming, checking = request(), request(f"{RID_PREFIX}1"), request("HEALTH_CHECK_1")
    of_all = SimpleNamespace(reqs=[ours, warming, checking])
    latencies._note(None, None, of_all)  # a chunk of the prompt: no token yet
    for count in (1, 2, 3):
        for each in of_all.reqs:
            each.output_ids.append(count)
            each.is_finished = count == 3
        latencies._note(None, None, of_all)
        assert len(measured.first_token) == (count == 3)
    latencies._note(None, None, of_all)
    (first,), (per_token,) = measured.first_token, measured.per_token
    assert 0.5 <= first < 60 and 0 <= per_token < 60


def test_metrics_show_targets_times_and_the_budget() -> None:
    registry = CollectorRegistry()
    metrics, turns = (
        TurnMetrics(registry),
        TrainingTurns(
            settings=Settings(tpot_target_ms=40.0),
            tpot_p50_ms=20.0,
            tpot_p95_ms=30.0,
            ttft_p50_ms=100.0,
            ttft_p95_ms=200.0,
            num_requests=7,
            share_used=0.25,
            budget_ms=None,
            slices=100,
            parts=50,
        ),
    )
    metrics.publish(turns)
    metrics.publish(turns)
    found = {sample.name: sample.value for metric in registry.collect() for sample in metric.samples}
    assert found["kt_runtime:training_tpot_target_ms"] == 40.0
    assert found["kt_runtime:training_ttft_target_ms"] == 0.0
    assert found["kt_runtime:training_tpot_p95_ms"] == 30.0
    assert found["kt_runtime:training_budget_ms"] == -1.0
    assert found["kt_runtime:training_parts"] == 50.0
    assert metrics.is_due and not metrics.is_due
