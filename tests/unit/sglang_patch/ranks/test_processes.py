"""What the kernel says of a process, and which rank a user is told of when ranks have died: real processes, with the
names that SGLang gives them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kt_runtime.sglang_patch.ranks.processes import first_death, look_at


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


@pytest.mark.slow
def test_the_kernel_says_who_is_stopped_and_who_computes() -> None:
    code = "import sys\nprint('begun', flush=True)\nx = 0\nwhile True: x += 1"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"begun\n"
            process.send_signal(19)
            stopped = look_at(process.pid)
            while stopped is None or not stopped.stopped:
                stopped = look_at(process.pid)
            again = look_at(process.pid)
            assert again is not None and again.main_seconds == stopped.main_seconds
            process.send_signal(18)
            while (now := look_at(process.pid)) is not None and now.main_seconds < stopped.main_seconds + 0.1:
                pass
            assert now is not None and not now.stopped
        finally:
            process.kill()
    assert look_at(process.pid) is None
