"""The platform for machines without a GPU."""

from __future__ import annotations

import torch
from system.forked_server import in_fork

from kt_runtime.resident.memory import keep_freed_memory, resident_set_bytes
from kt_runtime.sglang_patch.platform import CpuPlatform

SIZE = 24 << 20  # below the threshold that a training session sets: freed, it stays with the process


def kept_and_returned() -> tuple[int, int]:
    """Bytes that the process has more than at first: before the cache is emptied, and after."""
    platform = CpuPlatform()
    keep_freed_memory()
    before = resident_set_bytes()
    tensors = [torch.ones(SIZE, dtype=torch.uint8) for _ in range(8)]
    del tensors
    kept = resident_set_bytes()
    platform.empty_cache()
    return kept - before, resident_set_bytes() - before


def test_emptying_the_cache_returns_memory_that_a_training_session_keeps() -> None:
    """In a process of its own: the setting is the whole process's."""
    kept, returned = in_fork(kept_and_returned)
    assert kept > 6 * SIZE
    assert returned < SIZE
