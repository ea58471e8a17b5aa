"""A real server's scheduler hangs: `install` changes the process that calls it, and its forks.

HUNG_SCHEDULER names a file. While it exists, the scheduler's thread waits before it receives requests, as for a lock
that nobody gives back.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

CONTROL = "HUNG_SCHEDULER"


def install() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    ingest_requests = Scheduler.ingest_requests

    def hanging(self: Any, *args: Any, **kwargs: Any) -> Any:
        control = Path(os.environ[CONTROL])
        while control.exists():
            time.sleep(0.2)
        return ingest_requests(self, *args, **kwargs)

    Scheduler.ingest_requests = hanging  # type: ignore[method-assign]
