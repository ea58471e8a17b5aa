"""Without CUDA, SGLang's processes are forks of the frontend instead of new Python interpreters.

Symbol: `sglang.srt.entrypoints.engine.mp` (SGLang 0.5.23), the module that starts the scheduler and the detokenizer.
Reason: each new interpreter imports torch, transformers and SGLang again. These imports take 13 s of processor time and
several hundred MB per process; a fork has them already and shares their memory until it writes to it.

SGLang starts new interpreters because a fork of a process that has used CUDA can't use CUDA. Another danger of a fork
is a lock that one of the parent's other threads holds: the fork has the lock, but not the thread. At this point of the
start the frontend has its main thread and the console's thread, whose only lock no child uses.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from typing import Any

from kt_runtime.sglang_patch.freezing import freeze_all
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.signals import leave_to_frontend

ENGINE_PROCESSES = "sglang.srt.entrypoints.engine.mp"
SCHEDULER = "run_scheduler_process"


def install(hooks: Hooks, server_args: Any, on_rank: Callable[[ForkProcess], None] | None = None) -> None:
    """Does nothing with CUDA, nor with `--numa-node`, which SGLang applies to a new interpreter only.

    `on_rank`: called with each scheduler's process, in the order of ranks, once it has been started.
    """
    if not hooks.has_cuda_kernels and server_args.numa_node is None:
        hooks.set(ENGINE_PROCESSES, ForkingMultiprocessing(on_rank))


class ForkingMultiprocessing:
    """The module `multiprocessing` with forks for processes. The start method of other modules stays as it is."""

    def __init__(self, on_rank: Callable[[ForkProcess], None] | None = None) -> None:
        self._on_rank = on_rank

    def Process(self, *args: Any, **kwargs: Any) -> Forked:
        process = Forked(*args, **kwargs)
        process.on_rank = self._on_rank
        return process

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)


class Forked(ForkProcess):
    """Begins with Python's default signal handlers, as a new interpreter does, and leaves Ctrl-C to the frontend."""

    on_rank: Callable[[ForkProcess], None] | None = None
    _target: Any

    def start(self) -> None:
        # A garbage collection visits no frozen object. In the fork, each object that it visits would cost a copy.
        freeze_all()
        is_rank = getattr(self._target, "__name__", "") == SCHEDULER  # `start` forgets it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.on_rank is not None and is_rank:
            self.on_rank(self)

    def run(self) -> None:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        leave_to_frontend()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        super().run()
