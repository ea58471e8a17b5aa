"""Ctrl-C: once asks, twice stops; outside the context all is as it was."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from kt_runtime.train.run.interruption import Interruption


def test_once_asks_and_twice_stops(interrupt: Callable[[], None]) -> None:
    before = signal.getsignal(signal.SIGINT)
    said: list[str] = []
    with Interruption(said.append) as interruption:
        assert not interruption.requested
        interrupt()
        assert interruption.requested and len(said) == 1
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_batch_system_s_sigterm_asks_as_well() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interruption(lambda line: None) as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert interruption.requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_may_train_too() -> None:
    def use() -> None:
        with Interruption(print) as interruption:
            results.append(interruption.requested)

    results: list[bool] = []
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert results == [False]
