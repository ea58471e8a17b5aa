"""The platform for machines without a GPU."""

from __future__ import annotations

import subprocess
import sys

SIZE = 24 << 20  # below the threshold that a training session sets: freed, it stays with the process

PROGRAM = f"""
import torch
from kt_runtime.resident.memory import keep_freed_memory, resident_set_bytes
from kt_runtime.sglang_patch.platform import CpuPlatform
platform = CpuPlatform()
keep_freed_memory()
before = resident_set_bytes()
tensors = [torch.ones({SIZE}, dtype=torch.uint8) for _ in range(8)]
del tensors
kept = resident_set_bytes()
platform.empty_cache()
print(kept - before, resident_set_bytes() - before)
"""


def test_emptying_the_cache_returns_memory_that_a_training_session_keeps() -> None:
    """In a process of its own: the setting is the whole process's."""
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    kept, returned = (int(size) for size in done.stdout.split())
    assert kept > 6 * SIZE
    assert returned < SIZE
