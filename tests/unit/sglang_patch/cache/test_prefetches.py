"""SGLang's threads of prefetches are not stopped while another rank may wait for them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch.cache import prefetches


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetches.group, "num_ranks", lambda: 2)
    monkeypatch.setattr(prefetches, "_counts", prefetches.Prefetches())


def waiting() -> threading.Thread:
    thread = threading.Thread(target=prefetches._wait, args=(None,))
    thread.start()
    return thread


def ack(completed_req: bool | None) -> Any:
    return SimpleNamespace(completed_req=completed_req)


def test_a_question_that_is_not_answered_yet_is_waited_for(two_ranks: None) -> None:
    prefetches._asked(object())
    thread = waiting()
    assert thread.is_alive()
    prefetches._answered(64)
    thread.join(60.0)
    assert not thread.is_alive()


def test_reading_is_waited_for_to_its_last_acknowledgement(two_ranks: None) -> None:
    prefetches._begun((object(), 64))
    prefetches._acknowledged(None, None, ack(None))  # of a batch of pages
    thread = waiting()
    assert not prefetches._counts.have_ended()
    prefetches._acknowledged(None, None, ack(True))
    thread.join(60.0)
    assert not thread.is_alive()


def test_a_prefetch_without_room_in_the_host_tier_does_not_begin(two_ranks: None) -> None:
    prefetches._begun((None, 64))
    prefetches._wait(None)


def test_a_prefetch_that_never_ends_is_given_up(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefetches, "WAIT_SECONDS", 0.02)
    prefetches._asked(object())
    prefetches._wait(None)
    assert "have not ended" in caplog.text


def test_one_rank_waits_for_nobody(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetches.group, "num_ranks", lambda: 1)
    prefetches._asked(object())
    prefetches._wait(None)
