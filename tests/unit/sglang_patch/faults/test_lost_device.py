"""The process whose device is lost ends at once and says so; other errors are left to others."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from kt_runtime.sglang_patch.faults import lost_device

PROGRAM = """
import atexit, torch
from kt_runtime.sglang_patch.faults.lost_device import ends_process
atexit.register(print, "cleaned up")
try:
    with ends_process():
        raise {error}
finally:
    print("left the context")
"""


def run(error: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM.format(error=error)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_lost_device_ends_the_process_without_cleaning_up() -> None:
    status, out, err = run("torch.AcceleratorError('CUDA error: the device fell off the bus')")
    assert (status, out) == (lost_device.STATUS, "")
    assert "the device is lost, and nothing can be computed any more: CUDA error: the device fell off the bus" in err


@pytest.mark.parametrize("error", ["RuntimeError('x')", "torch.OutOfMemoryError('CUDA out of memory')"])
def test_other_errors_go_on(error: str) -> None:
    status, out, _ = run(error)
    assert (status, out) == (1, "left the context\ncleaned up\n")


def test_the_frontend_tells_it_by_the_status() -> None:
    running, ended, lost = (SimpleNamespace(exitcode=code) for code in (None, 1, lost_device.STATUS))
    assert lost_device.has_ended([running, lost]) and not lost_device.has_ended([running, ended])
