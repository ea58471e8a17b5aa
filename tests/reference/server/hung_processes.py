"""A real server's process hangs: `install` changes the process that calls it, and its forks.

HUNG_PROCESSES names a directory. While it has a file `scheduler`, the scheduler's thread waits before it receives
requests, as for a lock that nobody gives back; while it has `frontend`, the frontend's event loop does.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

CONTROL = "HUNG_PROCESSES"
SCHEDULER, FRONTEND = "scheduler", "frontend"


def install() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    from kt_runtime.sglang_patch.frontend.stalls import Stalls

    ingest_requests, check = Scheduler.ingest_requests, Stalls.check

    def hanging(self: Any, *args: Any, **kwargs: Any) -> Any:
        wait_for(SCHEDULER)
        return ingest_requests(self, *args, **kwargs)

    def hanging_loop(self: Stalls) -> None:
        """In the event loop, twice a second."""
        wait_for(FRONTEND)
        check(self)

    Scheduler.ingest_requests = hanging  # type: ignore[method-assign]
    Stalls.check = hanging_loop  # type: ignore[method-assign]


def wait_for(process: str) -> None:
    control = Path(os.environ[CONTROL]) / process
    while control.exists():
        time.sleep(0.2)
