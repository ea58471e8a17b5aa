"""The load of `bench interfere`, and its figures."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kt_runtime.bench.interfere.figures import (
    IDLE,
    TPOT_FACTOR,
    TRAINING,
    TTFT_FACTOR,
    WHOLE_CALLS,
    Answered,
    Targets,
    Trained,
    Window,
    percentiles,
    ratios,
    row_of,
    targets_of,
    tokens_per_s,
)
from kt_runtime.bench.interfere.plan import (
    ANSWER_MEDIAN,
    ANSWER_RANGE,
    HALF,
    PROMPT_MEDIAN,
    PROMPT_RANGE,
    Plan,
    burst,
    poisson,
)
from kt_runtime.bench.interfere.report import print_report
from kt_runtime.bench.interfere.run import trained_in
from kt_runtime.bench.interfere.trainer import Moment
from kt_runtime.bench.page.report import measurement_of, parse_report
from kt_runtime.errors import InvalidValueError, UnknownNameError

SECONDS = 40.0


def same(expected: Any) -> Any:
    """Equal but for the rounding of a few float64 operations: 9e-16 was measured."""
    return pytest.approx(expected, rel=5e-15, abs=0)


def answered(first: float, per_token: float, tokens: int = 11, sent: float = 5.0) -> Answered:
    return Answered(sent, [(sent + first + index * per_token, 1 + index) for index in range(tokens)])


def window(mode: str, times: list[tuple[float, float]], load: float = HALF, trained: Trained | None = None) -> Window:
    return Window(load, mode, 2.0, SECONDS, [answered(*each) for each in times], 0.8, trained)


def test_arrivals_are_poisson_and_only_their_gaps_depend_on_the_rate() -> None:
    slow, fast = (poisson(Plan(), rate, 2000 / rate, 700) for rate in (1.0, 10.0))
    gaps = np.diff([request.at_s for request in slow])
    assert len(slow) == pytest.approx(2000, rel=0.1)
    assert gaps.mean() == pytest.approx(1.0, rel=0.1) and gaps.std() == pytest.approx(gaps.mean(), rel=0.15)
    assert [(one.prompt, one.new_tokens) for one in slow] == [(one.prompt, one.new_tokens) for one in fast]
    assert [one.at_s for one in slow[:9]] == same([10 * one.at_s for one in fast[:9]])
    assert [one.prompt for one in poisson(Plan(seed=1), 1.0, 5.0, 700)] != [one.prompt for one in slow[:5]]


def test_no_window_finds_another_s_prompts_in_the_prefix_cache() -> None:
    """Lengths and arrivals are the same, and no two prompts begin with the same three tokens."""
    windows = [poisson(Plan(), 1.0, 40.0, 151_936, number) for number in range(8)]
    for requests in windows[1:]:
        assert [(one.at_s, len(one.prompt), one.new_tokens) for one in requests] == [
            (one.at_s, len(one.prompt), one.new_tokens) for one in windows[0]
        ]
    beginnings = [tuple(one.prompt[:3]) for requests in windows for one in requests]
    assert len({*beginnings}) == len(beginnings) > 200


def test_there_is_at_least_one_request_and_a_burst_comes_at_once() -> None:
    assert len(poisson(Plan(), 1e-6, 2.0, 700)) == 1
    assert {request.at_s for request in burst(Plan(burst=7), 700)} == {0.0} and len(burst(Plan(burst=7), 700)) == 7


def test_lengths_are_log_normal_and_cut_off() -> None:
    requests = poisson(Plan(), 1.0, 3000.0, 700)
    prompts, answers = [len(each.prompt) for each in requests], [each.new_tokens for each in requests]
    for lengths, median, allowed in ((prompts, PROMPT_MEDIAN, PROMPT_RANGE), (answers, ANSWER_MEDIAN, ANSWER_RANGE)):
        assert np.median(lengths) == pytest.approx(median, rel=0.1)
        assert min(lengths) >= allowed[0] and max(lengths) == allowed[1]
    assert all(3 <= token < 700 for each in requests for token in each.prompt)


def test_a_request_s_times_are_to_its_first_token_and_per_later_token() -> None:
    answer = Answered(5.0, [(5.5, 1), (5.7, 3), (6.5, 11)])
    assert answer.first_token == 0.5 and answer.per_token == same(0.1)
    assert answer.gaps == [same(0.2), same(0.8)]
    assert Answered(5.0, [(5.5, 1)]).per_token is None


def test_percentiles_are_measured_values_in_milliseconds() -> None:
    assert percentiles([each / 1000 for each in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def test_training_s_rate_is_between_ends_of_steps() -> None:
    assert tokens_per_s([10.0, 12.0, 14.0, 18.0], 100) == same(37.5)
    assert tokens_per_s([10.0], 100) is None


def test_a_window_counts_the_steps_that_it_cuts_in_part() -> None:
    """A step takes 4 s of slices: 2 s of them before the window, two whole steps, and 1 s of the last."""
    ends = [Moment(at, training, 0.0) for at, training in [(9.0, 100.0), (17.0, 104.0), (26.0, 108.0), (50.0, 112.0)]]
    found = trained_in(ends, Moment(10.0, 102.0, 0.0), Moment(30.0, 109.0, 5.0))
    assert found == Trained(seconds=20.0, slices_s=7.0, step_s=4.0) and found.steps == same(7 / 4)
    of_training = window(TRAINING, [(0.1, 0.01)], trained=found)
    assert of_training.training_tokens_per_s(1000) == same(1000 * 7 / 4 / 20)


def test_a_window_in_which_no_step_ended_has_no_rate() -> None:
    found = trained_in([Moment(9.0, 100.0, 0.0)], Moment(10.0, 100.0, 0.0), Moment(30.0, 103.0, 5.0))
    assert found.steps is None
    row = row_of(window(TRAINING, [(0.1, 0.01)], trained=found), Targets(25.0, 600.0), 1000, 500.0)
    assert row["training_tokens_per_s"] is None and row["training_time_share"] == same(3 / 20)


def test_targets_are_stated_or_follow_from_the_server_without_training() -> None:
    idle = window(IDLE, [(0.1, 0.010), (0.3, 0.020)])
    assert targets_of(idle, 7.0, 8.0) == Targets(7.0, 8.0)
    found = targets_of(idle, None, None)
    assert found.tpot_ms == same(TPOT_FACTOR * 20) and found.ttft_ms == same(TTFT_FACTOR * 300)


def rows() -> list[dict[str, Any]]:
    """Targets: 25 ms and 600 ms; steps of 1000 tokens; 500 tokens/s alone."""
    windows = [
        window(IDLE, [(0.1, 0.010), (0.3, 0.020)]),
        window(TRAINING, [(0.2, 0.020), (0.4, 0.024), (0.4, 0.024), (0.7, 0.010)], trained=Trained(40.0, 16.0, 2.0)),
        window(WHOLE_CALLS, [(2.0, 0.010), (0.3, 0.5), (0.5, 0.024)], trained=Trained(40.0, 10.0, None)),
    ]
    return [row_of(each, Targets(25.0, 600.0), 1000, 500.0) for each in windows]


def test_a_row_counts_the_requests_within_both_targets() -> None:
    idle, training, whole = rows()
    assert (idle["met_share"], training["met_share"], whole["met_share"]) == (1.0, 0.75, same(1 / 3))
    assert training["goodput_per_s"] == same(3 / SECONDS)
    assert training["training_tokens_per_s"] == same(200) and idle["training_tokens_per_s"] is None
    assert training["training_share_of_alone"] == same(0.4)
    assert training["training_time_share"] == same(0.4) and idle["training_time_share"] is None


def test_ratios_are_those_at_half_load() -> None:
    other = row_of(window(TRAINING, [(9.0, 9.0)], load=0.25), Targets(25.0, 600.0), 1000, 500.0)
    found = ratios([*rows(), other], SECONDS, 500.0, 480.0)
    assert found["p99_tpot_ratio"] == same(24 / 20)
    assert found["training_kept"] == same(200 / (500 * 0.5)) and found["left_over"] == 0.5
    assert found["idle_share"] == same(0.2)  # the engine is busy for 0.8 of the window without training
    assert found["training_kept_of_idle"] == same(200 / (500 * 0.2))
    assert found["training_kept_of_alone"] == same(200 / 500)
    assert found["training_alone_share"] == same(0.96)
    assert found["goodput_ratio"] == same(3.0)


def test_a_plain_goodput_of_nothing_counts_as_one_request() -> None:
    made = rows()
    made[2]["goodput_per_s"] = 0.0
    made[1]["training_tokens_per_s"] = None
    found = ratios(made, SECONDS, 500.0, 480.0)
    assert found["goodput_ratio"] == same(3.0) and found["training_kept"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"burst": 0}, "--burst is 0"),
        ({"seconds": 0.5}, "--seconds is 0.5"),
        ({"loads": (0.5, 3.0)}, "--load is 3"),
        ({"tpot_target_ms": -1.0}, "--tpot-target-ms -1"),
        ({"train_share": 0.0}, "--train-share 0"),
        ({"tokens": 1}, "each token is to predict the next"),
    ],
)
def test_a_senseless_size_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Plan(**fields)


def test_an_unknown_dtype_is_refused_and_half_load_is_always_measured_first() -> None:
    with pytest.raises(UnknownNameError, match="int8"):
        Plan(dtype="int8")
    assert Plan(loads=(0.75, 0.25)).all_loads == [0.5, 0.25, 0.75]
    assert Plan(seconds=30).seconds_of(0.25) == 15


def test_a_report_becomes_a_measurement_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    report: dict[str, Any] = {"machine": {"cpu": "a CPU", "processors": 2, "kt_runtime": "0"}}
    report |= {"interfere": Plan().facts() | {"dtype": "bfloat16"}, "rows": rows()}
    report |= ratios(rows(), SECONDS, 500.0, 480.0) | {"training_alone_tokens_per_s": 500.0}
    report |= {"capacity_requests_per_s": 4.0, "tpot_target_ms": 25.0, "ttft_target_ms": 600.0}
    origin = {"title": "t", "date": "2026-11-24", "machine": "m", "hardware": "h", "command": "c", "commit": "abc"}
    made = measurement_of(parse_report(json.dumps(report).encode(), "report"), **origin)
    found = {single.what: single.value for single in made.figures}
    assert made.kind == "interfere" and str(found["training at half load, of what is left over"]) == "0.8000"
    assert len(made.tables[0].rows) == 3
    print_report(report)
    shown = capsys.readouterr().out
    assert "1.20 times" in shown and "80 %" in shown and "96 %" in shown
