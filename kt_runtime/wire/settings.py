"""Settings of a running server that an operator may change: targets for serving, and training's share of the time.

`kt-runtime serve` states them, `PATCH /kt/settings` and `kt-runtime settings` change them. All three check here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kt_runtime.errors import InvalidValueError, UnknownNameError

TARGET_RANGE_MS = (0.1, 3.6e6)
WEIGHT_RANGE = (0.01, 100.0)
SCHEDULES = ("slices", "whole_calls")
KEYS = ("tpot_target_ms", "ttft_target_ms", "train_share", "schedule", "weights")
MOST_WEIGHTS, LONGEST_NAME = 256, 128


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tpot_target_ms`, `ttft_target_ms`: the time per output token and to the first token that serving must keep while
    training runs; None: no target. `train_share`: the largest share of time for training while requests are served.

    `weights`: session -> its weight among the sessions that train; 1 for those not named. `schedule`: "slices" runs
    training in slices between batches; "whole_calls" runs each training call to its end, for comparison.
    """

    tpot_target_ms: float | None = None
    ttft_target_ms: float | None = None
    train_share: float = 0.5
    schedule: Literal["slices", "whole_calls"] = "slices"
    weights: dict[str, float] = {}

    @property
    def has_target(self) -> bool:
        return self.tpot_target_ms is not None or self.ttft_target_ms is not None

    def weight(self, session: str) -> float:
        return self.weights.get(session, 1.0)


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """`settings` with the `changes`, of which each is checked before any counts. A target of None is taken away.

    `weights` changes those of the sessions that it names; None or 1 takes a session's weight away. Raises
    UnknownNameError for an unknown key, InvalidValueError for a value of another type or out of range.
    """
    values: dict[str, Any] = {}
    for key, value in changes.items():
        if key not in KEYS:
            raise UnknownNameError("setting", key[:LONGEST_NAME], KEYS)
        values[key] = _weights(settings, value) if key == "weights" else checked(key, value)
    return msgspec.structs.replace(settings, **values)


def checked(key: str, value: Any, called: str | None = None) -> Any:
    """The value of a setting other than `weights`. `called`: its name in the error, the key by default."""
    called = called or key
    if key == "schedule":
        if not isinstance(value, str) or value not in SCHEDULES:
            raise InvalidValueError(f"{called} {_short(value)}: allowed are {', '.join(SCHEDULES)}")
        return value
    if key == "train_share":
        number = _number(called, value, "a number above 0 and at most 1")
        if not 0 < number <= 1:
            raise InvalidValueError(f"{called} {number:g}: must be above 0 and at most 1")
        return number
    if value is None:
        return None
    lowest, highest = TARGET_RANGE_MS
    number = _number(called, value, "a number of milliseconds, or none")
    if not lowest <= number <= highest:
        raise InvalidValueError(f"{called} {number:g}: allowed are {lowest:g} to {highest:g} milliseconds, or none")
    return number


def _weights(settings: Settings, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise InvalidValueError(f"weights {_short(value)}: expected a weight for each session, as {{SESSION: NUMBER}}")
    weights = dict(settings.weights)
    lowest, highest = WEIGHT_RANGE
    for session, weight in value.items():
        if not isinstance(session, str) or not 0 < len(session) <= LONGEST_NAME:
            raise InvalidValueError(f"weights: {_short(session)}: expected the name of a session")
        number = 1.0 if weight is None else _number(f"weight of session {session!r}", weight, "a number")
        if not lowest <= number <= highest:
            raise InvalidValueError(f"weight of session {session!r} {number:g}: allowed are {lowest:g} to {highest:g}")
        weights.pop(session, None)
        if number != 1.0:
            weights[session] = number
    if len(weights) > MOST_WEIGHTS:
        raise InvalidValueError(f"weights: {len(weights)} sessions; at most {MOST_WEIGHTS} may have one")
    return weights


def _number(called: str, value: Any, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidValueError(f"{called} {_short(value)}: expected {expected}")
    return float(value)


def _short(value: Any) -> str:
    return f"{value!r}"[:100]
