"""The process whose device is lost ends at once and says so; other errors are left to others."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kt_runtime.sglang_patch.faults import lost_device


def run(error: Exception, directory: Path) -> tuple[int | None, str, str]:
    """Status, standard output and errors of a process in which `error` is raised: a fork, which has PyTorch already."""
    process = multiprocessing.get_context("fork").Process(target=_fail, args=(error, directory))
    process.start()
    process.join()
    return process.exitcode, (directory / "stdout").read_text(), (directory / "stderr").read_text()


def _fail(error: Exception, directory: Path) -> None:
    sys.stdout, sys.stderr = ((directory / name).open("w", buffering=1) for name in ("stdout", "stderr"))
    logging.basicConfig(force=True)  # to stderr, as without pytest
    # A process that `multiprocessing` starts, as SGLang starts the scheduler's, runs these at its end, and none of
    # `atexit`'s.
    Finalize(None, print, args=("ran its exit handlers",), exitpriority=0)
    try:
        with lost_device.ends_process():
            raise error
    finally:
        print("left the context")


def test_a_lost_device_ends_the_process_without_cleaning_up(tmp_path: Path) -> None:
    error = torch.AcceleratorError("CUDA error: the device fell off the bus")  # type: ignore[attr-defined]
    status, out, err = run(error, tmp_path)
    assert (status, out) == (lost_device.STATUS, "")
    assert "the device is lost, and nothing can be computed any more: CUDA error: the device fell off the bus" in err


@pytest.mark.parametrize("error", [RuntimeError("x"), torch.OutOfMemoryError("CUDA out of memory")], ids=str)
def test_other_errors_go_on(error: Exception, tmp_path: Path) -> None:
    status, out, _ = run(error, tmp_path)
    assert (status, out) == (1, "left the context\nran its exit handlers\n")


def test_the_frontend_tells_it_by_the_status() -> None:
    running, ended, lost = (SimpleNamespace(exitcode=code) for code in (None, 1, lost_device.STATUS))
    assert lost_device.has_ended([running, lost]) and not lost_device.has_ended([running, ended])
