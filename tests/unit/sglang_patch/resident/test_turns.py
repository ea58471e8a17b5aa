"""What training's turns read of SGLang's scheduler; that SGLang calls us at all is in tests/system."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from reference.resident.scheduler import Engine

from kt_runtime.resident.pacing.budget import IDLE, Load
from kt_runtime.resident.pacing.latencies import Latencies
from kt_runtime.sglang_patch.resident import latencies, turns
from kt_runtime.sglang_patch.resident.host import SGLangHost
from kt_runtime.sglang_patch.resident.turn_metrics import TurnMetrics
from kt_runtime.sglang_patch.warm_up import RID_PREFIX
from kt_runtime.wire.settings import Settings
from kt_runtime.wire.status import TrainingTurns


class Request(SimpleNamespace):
    def finished(self) -> bool:
        return bool(self.is_finished)


def request(rid: str = "r", *, prompt: int = 3, waited: float = 0.5) -> Request:
    times = SimpleNamespace(wait_queue_entry_time=time.perf_counter() - waited)
    return Request(rid=rid, output_ids=[], is_finished=False, time_stats=times, origin_input_ids=[5] * prompt)


def batch(*requests: Request, is_extend: bool = False, is_full: bool = False) -> SimpleNamespace:
    forward_mode = SimpleNamespace(is_extend=lambda: is_extend)
    return SimpleNamespace(reqs=list(requests), batch_is_full=is_full, forward_mode=forward_mode)


def decoding(num_tokens: int = 3, *, is_finished: bool = False) -> Request:
    made = request()
    made.output_ids, made.is_finished = [5] * num_tokens, is_finished
    made.kt_first_token_time = time.perf_counter() - 0.25
    return made


def load(**scheduler: Any) -> Load:
    host = object.__new__(SGLangHost)
    fields: dict[str, Any] = {"waiting_queue": [], "chunked_req": None, "last_batch": None}
    host._scheduler = SimpleNamespace(**({"is_fully_idle": lambda: False} | fields | scheduler))
    return host.load()


def test_what_has_its_first_token_decodes_and_what_has_none_waits() -> None:
    running = batch(decoding(3), decoding(9), decoding(is_finished=True))
    found = load(running_batch=running, last_batch=running)
    assert [tokens for _, tokens in found.decoding] == [3, 9] and found.waiting == 0 and found.is_serving
    assert all(0.25 <= age < 60 for age, _ in found.decoding)
    assert len(load(running_batch=running, last_batch=batch(decoding(1), is_extend=True)).decoding) == 3
    found = load(running_batch=running, waiting_queue=[request(prompt=40, waited=0.1), request(prompt=2, waited=0.75)])
    assert (found.waiting, found.waiting_tokens) == (2, 42) and 0.75 <= found.waited < 60
    in_chunks = request()
    found = load(running_batch=running, last_batch=batch(in_chunks, is_extend=True), chunked_req=in_chunks)
    assert (len(found.decoding), found.waiting) == (2, 1)
    assert load(running_batch=batch(), is_fully_idle=lambda: True) == IDLE


def test_what_finds_no_place_among_the_running_requests_does_not_hold_training_up() -> None:
    found = load(running_batch=batch(decoding(), is_full=True), waiting_queue=[request(), request()])
    assert (found.waiting, found.waited, found.waiting_tokens) == (0, 0.0, 0)


def test_a_scheduler_that_was_asked_to_end_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_ends", False)
    slept: list[bool] = []
    for ends in (False, True):
        turns._turn(lambda _scheduler: None, SimpleNamespace(gracefully_exit=ends))
        turns._sleep(slept.append, ends)
    assert slept == [False]


@pytest.mark.parametrize("held", [True, False])
def test_sglang_is_told_to_defer_prompts_where_the_resident_holds_them(
    monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    def defers(*, is_empty: bool = False, waiting: int = 1, chunked: bool = False, theirs: bool = False) -> bool:
        running = SimpleNamespace(is_empty=lambda: is_empty, is_prefill_only=False)
        scheduler = SimpleNamespace(waiting_queue=[1] * waiting, chunked_req=object() if chunked else None)
        return turns._defers(lambda _scheduler, _running: theirs, scheduler, running)

    assert not defers(), "without a resident"
    monkeypatch.setattr(turns, "_resident", SimpleNamespace(holds_prompts=lambda: held))
    assert defers() == held
    assert not defers(is_empty=True) and not defers(waiting=0) and not defers(chunked=True)
    assert defers(theirs=True)


def test_sglang_s_own_scheduler_makes_decode_steps_while_a_prompt_is_held(
    scheduled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held request loses nothing, and all answers have the bits that they have without."""
    scheduler = scheduled.scheduler
    prompts = {"early": [11, 12, 13, 14, 15], "late": [21] * 20}

    def answered(times: int) -> tuple[int, dict[str, list[int]]]:
        """Also the tokens that "early" has when "late" gets its first one."""
        left = iter(range(times))
        resident = SimpleNamespace(holds_prompts=lambda: next(left, None) is not None)
        monkeypatch.setattr(turns, "_resident", resident)
        original = type(scheduler)._should_defer_prefill
        monkeypatch.setattr(scheduler, "_should_defer_prefill", partial(turns._defers, original, scheduler))
        scheduled.clear()
        scheduled.send(scheduled.request("early", prompts["early"], stream=True))
        scheduled.step()
        scheduled.send(scheduled.request("late", prompts["late"], stream=True))
        while not scheduled.tokens.get("late"):
            assert scheduled.step()
        had = len(scheduled.tokens["early"])
        scheduled.run()
        return had, dict(scheduled.tokens)

    at_once, expected = answered(0)
    later, found = answered(3)
    assert later == at_once + 3 and found == expected and all(len(each) == 8 for each in found.values())
    _, found = answered(10**6)
    assert found == expected, "a prompt is not held when nothing else runs"


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
    metrics, found_turns = (
        TurnMetrics(registry),
        TrainingTurns(
            settings=Settings(tpot_target_ms=40.0),
            tpot_p50_ms=20.0,
            tpot_p95_ms=30.0,
            ttft_p50_ms=100.0,
            ttft_p95_ms=200.0,
            num_requests=7,
            share_used=0.25,
            serving_s=3.0,
            training_s=4.0,
            budget_ms=None,
            slices=100,
            parts=50,
        ),
    )
    metrics.publish(found_turns)
    metrics.publish(found_turns)
    found = {sample.name: sample.value for metric in registry.collect() for sample in metric.samples}
    assert found["kt_runtime:training_tpot_target_ms"] == 40.0
    assert found["kt_runtime:training_ttft_target_ms"] == 0.0
    assert found["kt_runtime:training_tpot_p95_ms"] == 30.0
    assert found["kt_runtime:training_budget_ms"] == -1.0
    assert found["kt_runtime:training_parts"] == 50.0
    assert metrics.is_due and not metrics.is_due


def idle_scheduler(**changes: Any) -> tuple[Any, list[float]]:
    """With the milliseconds of its rests."""
    rests: list[float] = []
    fields = {
        "enable_hierarchical_cache": True,
        "is_fully_idle": lambda: False,
        "idle_sleeper": SimpleNamespace(poller=SimpleNamespace(poll=rests.append)),
    }
    return SimpleNamespace(**(fields | changes)), rests


def test_it_rests_while_pages_move() -> None:
    waiting, rests = idle_scheduler()
    turns._rest(None, waiting)
    assert rests == [1.0]


@pytest.mark.parametrize("changes", [{"enable_hierarchical_cache": False}, {"is_fully_idle": lambda: True}])
def test_it_does_not_rest_without_tiers_nor_after_its_sleep(changes: dict[str, Any]) -> None:
    other, rests = idle_scheduler(**changes)
    turns._rest(None, other)
    assert not rests


def test_it_does_not_rest_while_there_is_training_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_resident", SimpleNamespace(has_work=lambda: True))
    waiting, rests = idle_scheduler()
    turns._rest(None, waiting)
    assert not rests
