"""Who asks for the status is answered when the weights' hash is known, or when they would not wait any longer."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from kt_runtime.resident.statuses import Statuses
from kt_runtime.wire.messages import GetStatus
from kt_runtime.wire.replies import DoneReply


class Desk:
    """`known` and `anew`: the hashes as they are computed; `told`: (request id, hash or error) of each answer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[Any] = []
        self.known: Future[str] = Future()
        self.anew: Future[str] = Future()
        self.woken = 0
        self.statuses = Statuses(
            self,  # type: ignore[arg-type]
            self._describe,
            lambda reply: None,
            self._fail,
            lambda: self.now,
            self._wake,
        )

    def _wake(self) -> None:
        self.woken += 1

    def future(self, *, fresh: bool = False) -> Future[str]:
        return self.anew if fresh else self.known

    def _describe(self, request_id: str, fingerprint: str) -> Any:
        self.told.append((request_id, fingerprint))
        return DoneReply(request_id=request_id)

    def _fail(self, request_id: str, error: Exception) -> None:
        self.told.append((request_id, str(error)))

    def ask(self, request_id: str, **fields: Any) -> None:
        self.statuses.ask(GetStatus(request_id=request_id, **fields))

    def turn(self, now: float) -> list[tuple[str, str]]:
        self.now, self.told = now, []
        self.statuses.answer_due()
        return self.told


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_known_hash_is_told_at_once(desk: Desk) -> None:
    desk.known.set_result("h")
    desk.ask("a")
    assert desk.told == [("a", "h")]
    assert not desk.statuses.is_due


def test_without_patience_the_answer_comes_without_the_hash(desk: Desk) -> None:
    desk.ask("now", wait_s=0)
    assert desk.told == [("now", "")]
    desk.ask("soon", wait_s=5)
    desk.ask("patient")
    assert desk.turn(4.9) == []
    assert desk.turn(5.0) == [("soon", "")]
    desk.known.set_result("h")
    assert desk.turn(1e6) == [("patient", "h")]
    assert not desk.statuses.is_due


def test_who_waits_keeps_nobody_awake_and_wakes_when_there_is_something_to_say(desk: Desk) -> None:
    desk.ask("patient")
    desk.ask("soon", wait_s=5)
    assert not desk.statuses.is_due
    desk.now = 5.0
    assert desk.statuses.is_due
    desk.turn(5.0)
    assert not desk.statuses.is_due and desk.woken == 0
    desk.known.set_result("h")
    assert desk.statuses.is_due and desk.woken == 2


def test_verifying_waits_for_a_new_hash_of_its_own(desk: Desk) -> None:
    desk.known.set_result("h")
    desk.ask("verify", verify_weights=True, wait_s=0)
    assert desk.turn(1e6) == []
    desk.anew.set_result("other")
    assert desk.turn(1e6) == [("verify", "other")]


def test_an_error_is_answered_once(desk: Desk) -> None:
    desk.ask("a")
    desk.known.set_exception(RuntimeError("broken"))
    assert desk.turn(0) == [("a", "broken")]
    assert desk.turn(0) == []
