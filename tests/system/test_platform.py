"""The platform for machines without a GPU."""

from __future__ import annotations

import os

import torch
from reference.server.anonymous_memory import anonymous_bytes
from system.forked_server import in_fork

from kt_runtime.resident.memory import keep_freed_memory
from kt_runtime.sglang_patch.platform import CpuPlatform

SIZE = 24 << 20  # below the threshold that a training session sets: freed, it stays with the process


def kept_and_returned() -> tuple[int, int]:
    """Bytes that the process has more than at first: before the cache is emptied, and after."""
    platform = CpuPlatform()
    keep_freed_memory()
    before = anonymous_bytes(os.getpid())
    tensors = [torch.ones(SIZE, dtype=torch.uint8) for _ in range(8)]
    del tensors
    kept = anonymous_bytes(os.getpid())
    platform.empty_cache()
    return kept - before, anonymous_bytes(os.getpid()) - before


def test_emptying_the_cache_returns_memory_that_a_training_session_keeps() -> None:
    """In a process of its own: the setting is the whole process's."""
    kept, returned = in_fork(kept_and_returned)
    assert kept > 6 * SIZE
    assert returned < 1 << 20  # 16 KiB measured
