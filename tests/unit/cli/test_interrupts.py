"""An interrupted command cleans up whole and ends with KeyboardInterrupt, whenever the signal arrives."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.cli import server_process
from kt_runtime.cli.interrupts import SIGNALS, Interruptible, uninterrupted
from kt_runtime.errors import RuntimeFault

SLEEPER = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Python's own handlers before each test, and those of the test run after it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_raises_and_further_ones_do_not_cut_the_cleanup_short(number: signal.Signals) -> None:
    cleaned = []
    with pytest.raises(KeyboardInterrupt), Interruptible():
        try:
            signal.raise_signal(number)
        finally:
            for another in SIGNALS:
                signal.raise_signal(another)
            cleaned.append(True)
    assert cleaned
    signal.raise_signal(number)  # until the process has ended


@pytest.mark.parametrize("error", [ImportError("initialization failed"), RuntimeFault("HTTP 500"), SystemExit(1)])
def test_an_exception_in_place_of_the_interrupt_ends_as_interrupt(error: BaseException) -> None:
    with pytest.raises(KeyboardInterrupt) as raised, Interruptible():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None
    assert raised.value.__cause__ is error


def test_a_signal_in_an_event_loop_ends_as_interrupt() -> None:
    """A stream that answers its cancellation with an error of its own."""

    async def stream() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            raise RuntimeFault("the connection broke") from None

    async def streams() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await asyncio.gather(stream(), stream())

    with pytest.raises(KeyboardInterrupt), Interruptible():
        asyncio.run(streams())


def test_an_interrupt_that_a_destructor_swallowed_is_found_and_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: printed.append(found.exc_type))

    class Handle:
        def __init__(self, error: type[Exception] | None = None) -> None:
            self.error = error

        def __del__(self) -> None:
            if self.error is not None:
                raise self.error
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), Interruptible() as interruptible:
        interruptible.check()
        Handle()
        Handle(ValueError)  # another's error is printed as without this context
        interruptible.check()
        pytest.fail("the command goes on")
    assert printed == [ValueError]
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), Interruptible():
        Handle()
    Handle(KeyError)
    assert printed == [ValueError, KeyError]


def test_without_a_signal_errors_and_handlers_stay() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a background job
    with pytest.raises(RuntimeFault), Interruptible():
        signal.raise_signal(signal.SIGINT)
        raise RuntimeFault("ours")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


@pytest.mark.parametrize("moment", ["begin", "use", "end"])
def test_what_is_begun_is_ended_whenever_the_signal_arrives(moment: str) -> None:
    done: list[str] = []

    def step(name: str) -> None:
        if name == moment:
            signal.raise_signal(signal.SIGINT)
        done.append(name)

    with pytest.raises(KeyboardInterrupt), uninterrupted() as acting:
        step("begin")
        try:
            with acting():
                step("use")
        finally:
            step("end")
    assert done == (["begin", "use", "end"] if moment == "end" else ["begin", "end"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_run_the_block_as_it_is() -> None:
    done: list[Any] = []

    def work() -> None:
        with uninterrupted() as acting, acting():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


@pytest.mark.parametrize("moment", ["start", "ready", "use", "stop"])
def test_the_server_has_ended_whenever_signals_arrive(
    moment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A signal at `moment`, and another one while the server, which ignores SIGTERM, is being ended."""
    processes: list[subprocess.Popen[bytes]] = []

    def interrupt(now: str) -> None:
        if now in (moment, "stop"):
            signal.raise_signal(signal.SIGINT)

    def start(_: list[str], log: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SLEEPER]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        interrupt("start")
        return process

    def stop(process: subprocess.Popen[bytes], stop: Any = server_process._stop) -> None:
        interrupt("stop")
        stop(process)

    monkeypatch.setattr(server_process, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(server_process, "_start", start)
    monkeypatch.setattr(server_process, "_wait_ready", lambda *_: interrupt("ready"))
    monkeypatch.setattr(server_process, "_stop", stop)
    with (
        pytest.raises(KeyboardInterrupt),
        Interruptible(),
        server_process.server("model", [], tmp_path / "log"),
    ):
        interrupt("use")
    assert [process.poll() for process in processes] == [-signal.SIGKILL]
    assert processes[0].stdout is not None
    processes[0].stdout.close()
