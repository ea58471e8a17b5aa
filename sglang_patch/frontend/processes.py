"""Without CUDA, SGLang's processes are forks of the frontend instead of new Python interpreters.

Symbol: `sglang.srt.entrypoints.engine.mp` (SGLang 0.5.23), the module that starts the scheduler and the detokenizer.
Reason: each new interpreter imports torch, transformers and SGLang again. These imports take 13 s of processor time and
several hundred MB per process; a fork has them already and shares their memory until it writes to it.

SGLang starts new interpreters because a fork of a process that has used CUDA can't use CUDA. Another danger of a fork
is a lock that one of the parent's other threads holds: the fork has the lock, but not the thread. At this point of the
start the frontend has its main thread and the console's thread, whose only lock no child uses.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
from multiprocessing.context import ForkProcess
from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.signals import leave_to_frontend

ENGINE_PROCESSES = "sglang.srt.entrypoints.engine.mp"


def install(hooks: Hooks, server_args: Any) -> None:
    """Does nothing with CUDA, nor with `--numa-node`, which SGLang applies to a new interpreter only."""
    if not hooks.has_cuda_kernels and server_args.numa_node is None:
        hooks.set(ENGINE_PROCESSES, ForkingMultiprocessing())


class ForkingMultiprocessing:
    """The module `multiprocessing` with forks for processes. The start method of other modules stays as it is."""

    @property
    def Process(self) -> type[Forked]:
        return Forked

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)


class Forked(ForkProcess):
    """Begins with Python's default signal handlers, as a new interpreter does, and leaves Ctrl-C to the frontend."""

    def start(self) -> None:
        # A garbage collection visits no frozen object. In the fork, each object that it visits would cost a copy.
        gc.collect()
        gc.freeze()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(self) -> None:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        leave_to_frontend()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        super().run()
