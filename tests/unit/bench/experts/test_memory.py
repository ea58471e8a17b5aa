from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kt_runtime.bench.experts import memory
from kt_runtime.bench.experts.plan import SHAPES, BenchShape
from kt_runtime.errors import InvalidValueError


def test_a_shape_that_does_not_fit_is_refused_with_the_number_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_cpu_bytes", lambda: 8 << 30)
    with pytest.raises(InvalidValueError, match=r"dsv3 with 256 experts needs 6\d GiB .* 8 GiB are free"):
        memory.check_memory(SHAPES["dsv3"], with_kt_kernel=False)
    with pytest.raises(InvalidValueError, match=r"--experts \d+ would fit"):
        memory.check_memory(SHAPES["dsv3"], with_kt_kernel=False)


def test_the_number_of_experts_that_is_offered_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_cpu_bytes", lambda: 8 << 30)
    with pytest.raises(InvalidValueError) as refused:
        memory.check_memory(SHAPES["kimi"], with_kt_kernel=True)
    offered = int(str(refused.value).rpartition("--experts ")[2].split()[0])
    memory.check_memory(SHAPES["kimi"].with_experts(offered), with_kt_kernel=True)


def test_a_small_shape_fits(shape: BenchShape) -> None:
    memory.check_memory(shape, with_kt_kernel=True)
    memory.check_disk(shape, [])


def peak_can_be_reset() -> bool:
    """Whether this system has the file that PeakMemory needs; where it has not, the figure must be None."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def test_peak_memory_counts_what_was_freed_again() -> None:
    with memory.PeakMemory() as peak:
        torch.ones(64 << 20, dtype=torch.uint8)
    assert (peak.extra_bytes is not None) == peak_can_be_reset()
    assert peak.extra_bytes is None or 60 << 20 < peak.extra_bytes < 120 << 20
