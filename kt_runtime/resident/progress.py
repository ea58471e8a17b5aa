"""A starting server's progress, as log lines that the console prints unchanged (`serve.console`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOGGER_NAME = "kt_runtime.progress"
REPORT_SECONDS = 5.0

logger = logging.getLogger(LOGGER_NAME)


class LayersRead:
    """Callback for `ExpertStore.load`: logs bytes read and rate, at most every 5 s, and at the end."""

    def __init__(self, layer_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`layer_bytes`: bytes of one layer's experts in the checkpoint."""
        self._layer_bytes, self._clock = layer_bytes, clock
        self._started_s = self._reported_s = clock()

    def __call__(self, num_read: int, num_layers: int) -> None:
        now_s = self._clock()
        if num_read < num_layers and now_s < self._reported_s + REPORT_SECONDS:
            return
        self._reported_s = now_s
        read, in_all = num_read * self._layer_bytes, num_layers * self._layer_bytes
        rate = read / max(now_s - self._started_s, 1e-3)
        left = "" if num_read == num_layers else f", {(in_all - read) / rate:.0f} s left"
        logger.info(
            "experts: %s of %s read (%d of %d layers), %s/s%s",
            *(_gibibytes(read), _gibibytes(in_all), num_read, num_layers, _gibibytes(int(rate)), left),
        )


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
