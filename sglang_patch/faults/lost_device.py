"""A device that does no more work, because it is gone or a kernel on it has failed, ends the server.

Every later call on such a device fails, so no request could be computed again, and no session could train on. The
scheduler's process ends at once, with a status that tells the frontend why: cleaning up would need the device.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kt_runtime import device

logger = logging.getLogger(__name__)

STATUS = 71
MESSAGE = "the device is lost: it is gone, or a kernel on it has failed; the log has the error"


@contextmanager
def ends_process() -> Iterator[None]:
    """Ends this process if the error that leaves the context says that its device is lost."""
    try:
        yield
    except Exception as error:
        if device.is_lost(error):
            logger.critical("the device is lost, and nothing can be computed any more: %s", error, exc_info=error)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(STATUS)
        raise


def has_ended(processes: Iterable[Any]) -> bool:
    """Did `ends_process` end one of these `multiprocessing` processes?"""
    return any(process.exitcode == STATUS for process in processes)
