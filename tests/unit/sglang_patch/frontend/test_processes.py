"""SGLang's processes are forks of the frontend where a fork is safe, and start as a new interpreter does."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch.frontend import processes
from kt_runtime.sglang_patch.hooks import Hooks

HELD: list[str] = []
NEW: list[list[int]] = []


@pytest.fixture(autouse=True)
def held() -> Iterator[None]:
    """What a test froze stays frozen: to collect all that this process froze for its tests takes two seconds."""
    yield
    HELD.clear()
    NEW.clear()


def attributes(on_cpu: bool, numa_node: list[int] | None, has_cuda_kernels: bool | None = None) -> list[str]:
    hooks = Hooks(on_cpu, has_cuda_kernels)
    processes.install(hooks, SimpleNamespace(numa_node=numa_node))
    return [target for target, *_ in hooks._attributes]


def test_only_where_no_cuda_and_no_binding_needs_a_new_interpreter() -> None:
    assert attributes(on_cpu=True, numa_node=None) == [processes.ENGINE_PROCESSES]
    assert attributes(on_cpu=False, numa_node=None, has_cuda_kernels=False) == [processes.ENGINE_PROCESSES]
    assert attributes(on_cpu=False, numa_node=None) == attributes(on_cpu=True, numa_node=[0]) == []


def test_all_but_processes_is_multiprocessings() -> None:
    replaced = processes.ForkingMultiprocessing()
    assert replaced.Pipe == multiprocessing.Pipe and replaced.set_start_method == multiprocessing.set_start_method
    assert multiprocessing.Process is not replaced.Process


def report(pipe: Any) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)]
    looked_at = {id(one) for one in gc.get_objects()}  # the collector's generations, without what is frozen
    not_frozen = sum(id(one) in looked_at for one in NEW)
    pipe.send((os.getppid(), list(HELD), handlers, len(signal.pthread_sigmask(0, ())), len(NEW), not_frozen))


@pytest.mark.slow
def test_a_fork_has_what_the_frontend_imported_and_none_of_its_signal_handlers() -> None:
    HELD.append("imported by the frontend")
    NEW.extend([number] for number in range(2000))
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        here, there = multiprocessing.Pipe(duplex=False)
        process = processes.ForkingMultiprocessing().Process(target=report, args=(there,))
        process.start()
        assert here.poll(60)
        parent, held, handlers, blocked, new, not_frozen = here.recv()
        process.join(60)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (parent, held, blocked, process.exitcode) == (os.getpid(), ["imported by the frontend"], 0, 0)
    assert handlers == [signal.SIG_DFL, signal.SIG_IGN, signal.SIG_IGN]
    assert (new, not_frozen) == (2000, 0)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
