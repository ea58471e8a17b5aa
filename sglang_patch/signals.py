"""Who a signal is for, when every process of a server gets it: Ctrl-C in a terminal, a service manager's SIGTERM.

Processes (SGLang 0.5.23): those of `run_scheduler_process` and `run_detokenizer_process`, which would end at once.
Reason: the frontend lets requests finish and then asks the scheduler to end, which writes down what the prefix cache
still has to; with one of them gone it can only end the rest. They can't outlive it: the frontend kills them when they
take too long, and the kernel when the frontend dies.
"""

from __future__ import annotations

import multiprocessing
import signal

from kt_runtime.resident.config import ResidentSettings
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.managers.scheduler.run_scheduler_process",
    "sglang.srt.managers.detokenizer_manager.run_detokenizer_process",
)


def install(hooks: Hooks) -> None:
    """In a process that a server of `kt-runtime serve` started; in any other process, nothing."""
    if ResidentSettings.from_environment() is not None and multiprocessing.parent_process() is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
