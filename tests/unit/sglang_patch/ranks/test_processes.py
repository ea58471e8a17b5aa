"""Which rank a user is told of when ranks have died: real processes, with the names that SGLang gives them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kt_runtime.sglang_patch.ranks.processes import first_death


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failed() -> None:
    os._exit(3)


def ended(*ways: Callable[[], None]) -> SimpleNamespace:
    """SGLang's watchdog over processes that have ended so."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=way) for way in ways]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return SimpleNamespace(_processes=processes, _names=[f"scheduler_{place}" for place in range(len(processes))])


def test_the_rank_that_a_signal_has_ended_comes_before_those_that_failed_for_it() -> None:
    watchdog = ended(failed, killed)
    assert first_death(watchdog) == f"rank 1 (process {watchdog._processes[1].pid}) has died: SIGKILL"


def test_a_rank_that_failed_by_itself() -> None:
    watchdog = ended(failed, failed)
    assert first_death(watchdog) == f"rank 0 (process {watchdog._processes[0].pid}) has died: it ended with status 3"


@pytest.mark.parametrize("names", [["scheduler_0"], ["scheduler_0", "detokenizer_0"]])
def test_nothing_is_said_of_a_single_rank(names: list[str]) -> None:
    watchdog = ended(*[killed] * len(names))
    watchdog._names = names
    assert first_death(watchdog) == ""
