"""SGLang's child processes ignore signals that every process of a server receives: Ctrl-C, a service manager's SIGTERM.

Processes (SGLang 0.5.23): `run_scheduler_process` and `run_detokenizer_process`, which would otherwise end immediately.
Reason: the frontend lets requests finish, then asks the scheduler to end, and the scheduler writes the prefix cache's
remaining pages. If one of these processes is gone, the frontend can only kill the others. The child processes can't
outlive the frontend: it kills them when they take too long, and the kernel kills them when the frontend dies.
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
    """Ignores SIGINT and SIGTERM in child processes of `kt-runtime serve`. Does nothing in any other process."""
    if ResidentSettings.from_environment() is not None and multiprocessing.parent_process() is not None:
        leave_to_frontend()


def leave_to_frontend() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
