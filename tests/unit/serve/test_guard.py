"""When the guard ends a frontend. Here the frontend is a process with an event loop alone; servers: system/faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from kt_runtime.serve.guard import SILENT_LOOKS, Silence, thread_states

SECONDS = 120.0
FRONTEND = textwrap.dedent(
    """
    import asyncio, pathlib, sys, time
    from kt_runtime.serve.guarded import guarded

    async def main():
        async with guarded(*map(pathlib.Path, sys.argv[2:]), look_s=0.05, beat_s=0.025):
            await asyncio.sleep(0.5)  # many looks: a loop that runs is left alone
            print("runs", flush=True)
            if sys.argv[1] == "hangs":
                time.sleep(600)
            elif sys.argv[1] == "waits":
                await asyncio.sleep(600)

    asyncio.run(main())
    print("ended", flush=True)
    """
)


def looks(states: str, number: int = SILENT_LOOKS, silence: Silence | None = None) -> list[str]:
    silence = silence or Silence()
    return [silence.look(states) for _ in range(number)]


@pytest.mark.parametrize(
    ("states", "why"), [("T", "stopped"), ("TTTT", "stopped"), ("S", "sleep"), ("SSS", "sleep"), ("ZSS", "sleep")]
)
def test_a_process_that_can_not_go_on_is_named_after_as_many_looks_as_are_allowed(states: str, why: str) -> None:
    *before, last = looks(states)
    assert set(before) == {""} and why in last


@pytest.mark.parametrize("states", ["R", "SSR", "D", "SD", "t", "St", "", "Z", "X"])
def test_a_process_that_computes_waits_for_a_disk_is_debugged_or_has_ended_is_left_alone(states: str) -> None:
    assert set(looks(states, 10 * SILENT_LOOKS)) == {""}


def test_a_beat_begins_the_count_anew() -> None:
    silence = Silence()
    for _ in range(5):
        assert set(looks("SS", SILENT_LOOKS - 1, silence)) == {""}
        silence.beat()


def test_a_process_that_gets_a_processor_now_and_then_is_not_ended_and_one_that_seldom_does_is() -> None:
    silence = Silence()
    for _ in range(10 * SILENT_LOOKS):
        assert not silence.look("SS") and not silence.look("RS")
    assert any(silence.look("SS") or silence.look("SS") or silence.look("RS") for _ in range(2 * SILENT_LOOKS))


def test_the_states_are_those_of_the_kernel() -> None:
    assert "R" in thread_states(os.getpid())
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert set(thread_states(process.pid)) == {"T"}
        process.kill()
    process.wait()
    assert thread_states(process.pid) == ""


def started(how: str, directory: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """The frontend, whose event loop runs, and its guard. Of two files that it would leave, one is there."""
    (directory / "left").touch()
    with (directory / "log").open("w") as log:
        frontend = subprocess.Popen(
            [sys.executable, "-P", "-c", FRONTEND, how, directory / "absent", directory / "left"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "A_KEY": "secret"},
        )
    assert frontend.stdout is not None and frontend.stdout.readline() == "runs\n"
    if how == "ends":
        return frontend, psutil.Process(frontend.pid)
    (guard,) = psutil.Process(frontend.pid).children()
    return frontend, guard


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [("waits", "is stopped by a signal"), ("hangs", "hangs: all of its threads")])
def test_a_frontend_that_is_stopped_or_hangs_is_killed_and_the_log_says_why(
    how: str, said: str, tmp_path: Path
) -> None:
    frontend, guard = started(how, tmp_path)
    assert "A_KEY" not in guard.environ()
    if how == "waits":
        frontend.send_signal(signal.SIGSTOP)
    assert frontend.wait(SECONDS) == -signal.SIGKILL
    guard.wait(SECONDS)
    assert not (tmp_path / "left").exists()
    assert f"the frontend (process {frontend.pid}) {said}" in (tmp_path / "log").read_text()
    assert frontend.stdout is not None
    frontend.stdout.close()


@pytest.mark.slow
def test_a_frontend_that_ends_ends_its_guard_however_it_ends(tmp_path: Path) -> None:
    frontend, guard = started("waits", tmp_path)
    frontend.kill()
    frontend.wait(SECONDS)
    guard.wait(SECONDS)
    assert not (tmp_path / "left").exists()
    ending, _ = started("ends", tmp_path)
    assert ending.stdout is not None and ending.stdout.read() == "ended\n"
    assert ending.wait(SECONDS) == 0
    assert (tmp_path / "left").exists()  # a frontend that ends by itself removes its files
    for process in (frontend, ending):
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.slow
def test_without_its_guard_a_frontend_goes_on(tmp_path: Path) -> None:
    frontend, guard = started("waits", tmp_path)
    guard.kill()
    while "its guard has ended" not in (tmp_path / "log").read_text():  # pytest's own limit ends this
        assert frontend.poll() is None
        time.sleep(0.05)
    frontend.kill()
    frontend.wait()
    assert frontend.stdout is not None
    frontend.stdout.close()
