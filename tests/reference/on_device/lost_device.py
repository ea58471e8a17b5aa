"""A real server's device is lost: `install` changes the process that calls it, and its forks.

LOST_DEVICE names a file. While it says "serving", PyTorch's error of a failed device comes from the next step that is
computed; while it says "training", from the next layer that is trained.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTROL = "LOST_DEVICE"
ERROR = "CUDA error: the launch timed out and was terminated"


def failing(call: Callable[..., Any], when: str) -> Callable[..., Any]:
    import torch

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        control = Path(os.environ[CONTROL])
        if control.exists() and control.read_text() == when:
            raise torch.AcceleratorError(ERROR)
        return call(*args, **kwargs)

    return wrapped


def install() -> None:
    from kt_runtime.resident.twin.model import Twin
    from kt_runtime.sglang_patch.faults import finite_rows

    finite_rows.mark_requests = failing(finite_rows.mark_requests, "serving")
    Twin.run_layer = failing(Twin.run_layer, "training")  # type: ignore[method-assign]
