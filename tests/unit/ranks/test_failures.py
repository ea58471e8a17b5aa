"""Which of several failures a user is told of."""

from __future__ import annotations

from kt_runtime.ranks.failures import CUT_OFF, FAILED, SIGNALLED, STOPPED, Failure, cause_of


def test_the_one_nearest_to_the_cause_and_of_equals_the_first() -> None:
    kinds = {"a": FAILED, "b": FAILED, "c": CUT_OFF, "d": STOPPED, "e": SIGNALLED, "f": SIGNALLED}
    failures = [Failure(why, kind) for why, kind in kinds.items()]
    assert [cause_of(failures[:number]) for number in range(7)] == [
        None,
        *(failures[place] for place in (0, 0, 2, 3, 4, 4)),
    ]
