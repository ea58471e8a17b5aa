from __future__ import annotations

import math
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.wire.settings import Settings, changed


def test_only_what_is_named_changes_and_a_target_of_none_is_taken_away() -> None:
    settings = changed(Settings(), {"tpot_target_ms": 40, "ttft_target_ms": 500.0})
    assert (settings.tpot_target_ms, settings.ttft_target_ms, settings.train_share) == (40.0, 500.0, 0.5)
    settings = changed(settings, {"tpot_target_ms": None, "train_share": 1})
    assert (settings.tpot_target_ms, settings.ttft_target_ms, settings.train_share) == (None, 500.0, 1.0)
    assert settings.has_target and not changed(settings, {"ttft_target_ms": None}).has_target
    assert changed(settings, {}) == settings


def test_weights_are_changed_one_session_at_a_time_and_1_takes_one_away() -> None:
    settings = changed(changed(Settings(), {"weights": {"a": 2, "b": 0.5}}), {"weights": {"b": 1, "c": 3.0}})
    assert settings.weights == {"a": 2.0, "c": 3.0}
    assert (settings.weight("a"), settings.weight("b")) == (2.0, 1.0)
    assert changed(settings, {"weights": {"a": None, "c": None}}).weights == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tpot_target_ms": 0}, "tpot_target_ms 0: allowed are 0.1 to 3.6e"),
        ({"tpot_target_ms": -5.0}, "tpot_target_ms -5"),
        ({"ttft_target_ms": "fast"}, "ttft_target_ms 'fast': expected a number of milliseconds"),
        ({"ttft_target_ms": True}, "ttft_target_ms True"),
        ({"ttft_target_ms": math.inf}, "ttft_target_ms inf"),
        ({"train_share": 0.0}, "train_share 0: must be above 0 and at most 1"),
        ({"train_share": 1.5}, "train_share 1.5"),
        ({"train_share": None}, "train_share None"),
        ({"schedule": "often"}, "schedule 'often': allowed are slices, whole_calls"),
        ({"schedule": ["slices"]}, "schedule"),
        ({"weights": 2}, "weights 2: expected a weight for each session"),
        ({"weights": {"a": 0}}, "weight of session 'a' 0: allowed are 0.01 to 100"),
        ({"weights": {"a": "much"}}, "weight of session 'a' 'much'"),
        ({"weights": {"a" * 200: 2}}, "expected the name of a session"),
        ({"weights": {f"s{index}": 2 for index in range(300)}}, "300 sessions; at most 256"),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        changed(Settings(), changes)


def test_an_unknown_setting_is_named_with_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match="tpot_target_ms"):
        changed(Settings(), {"tpot_target": 40})
