"""What becomes of freed memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kt_runtime.resident.memory import FreedMemory, resident_set_bytes, return_freed_memory

TESTS = Path(__file__).parents[2]
MIB = 1 << 20
SIZE = 24 * MIB  # above the C library's default threshold for mapping, below the raised one

PROGRAM = f"""
import numpy
from kt_runtime.resident.memory import return_freed_memory, keep_freed_memory, resident_set_bytes
print(keep_freed_memory())
before = resident_set_bytes()
arrays = [numpy.ones({SIZE}, numpy.uint8) for _ in range(8)]
del arrays
kept = resident_set_bytes()
return_freed_memory()
print(kept - before, resident_set_bytes() - before)
"""


@pytest.mark.slow
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    """In a process of its own: the setting is the whole process's."""
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    is_set, sizes = done.stdout.splitlines()
    kept, given_back = (int(size) for size in sizes.split())
    assert is_set == "True"
    assert kept > 6 * SIZE
    assert given_back < SIZE


HOLES = """
import numpy
from kt_runtime.resident.memory import FreedMemory, keep_freed_memory, resident_set_bytes
freed = FreedMemory(0)
print(keep_freed_memory(freed.most_bytes))
arrays = [numpy.ones(1 << 19, numpy.uint8) for _ in range(200)]
before = resident_set_bytes()
held = arrays[1::2]  # between holes, which the C library keeps by itself
del arrays
kept = resident_set_bytes()
freed.give_back()
print(before - kept, before - resident_set_bytes(), freed.most_bytes)
"""


@pytest.mark.slow
def test_a_rank_gives_back_the_holes_between_its_tensors() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", HOLES], capture_output=True, text=True, check=True)
    is_set, sizes = done.stdout.splitlines()
    by_itself, given_back, most = (int(size) for size in sizes.split())
    assert is_set == "True" and most == 4 << 20
    assert by_itself < 5 << 20
    assert given_back > 40 << 20  # of 50


RESERVED = """
import os, sys
sys.path.append(sys.argv[1])
from reference.server.anonymous_memory import anonymous_bytes
from kt_runtime.resident.memory import reserve_for_small_objects
MIB, PID = 1 << 20, os.getpid()

def used():
    before = anonymous_bytes(PID)
    objects = [b"%400d" % number for number in range(3 * MIB // 448)]
    return anonymous_bytes(PID) - before

anonymous_bytes(PID)  # what reading it takes is there afterwards
if "reserve" in sys.argv:
    before = anonymous_bytes(PID)
    reserve_for_small_objects(4 * MIB)
    print(anonymous_bytes(PID) - before)
print(used(), used())
"""

UNUSED = """
import os, re, sys, tempfile
sys.path.append(sys.argv[1])
from reference.server.anonymous_memory import anonymous_bytes
from kt_runtime.resident.memory import reserve_for_small_objects

def unused_pools():
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        sys._debugmallocstats()
        file.seek(0)
        return int(re.search(rb"([0-9]+) unused pools", file.read())[1])

anonymous_bytes(os.getpid())
reserve_for_small_objects(int(sys.argv[2]))
objects = [None] * (32 * (unused_pools() - 4))  # 32 in a pool; a few pools are for other objects
before = anonymous_bytes(os.getpid())
for number in range(len(objects)):
    objects[number] = bytes(448)
print(len(objects) * 496, anonymous_bytes(os.getpid()) - before)
"""


def grown(*arguments: str) -> list[int]:
    command = [sys.executable, "-P", "-c", RESERVED, str(TESTS), *arguments]
    return [int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


@pytest.mark.slow
def test_what_is_reserved_is_used_again_and_again() -> None:
    taken, first, second = grown("reserve")
    assert 4 << 20 < taken < 6 << 20
    assert max(first, second) < 1 << 16  # 8 KiB measured
    assert grown()[0] > 2 << 20  # without it


@pytest.mark.slow
def test_a_reserve_has_the_pages_of_its_last_arena_to_the_end() -> None:
    """Of four sizes, a quarter of an arena apart, one ends in the first half of an arena."""
    for quarters in range(16, 20):
        command = [sys.executable, "-P", "-c", UNUSED, str(TESTS), str(quarters << 18)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        used, more = map(int, done.stdout.split())
        assert used > 4 * MIB
        assert more < 1 << 16  # 0 measured; 12 to 606 KB when Python writes the last pages first


def test_what_a_rank_keeps_grows_with_its_share() -> None:
    assert [FreedMemory(size).most_bytes for size in (0, 256 << 30, 1 << 50)] == [4 << 20, 1 << 30, 1 << 30]
    assert FreedMemory(8 << 30).most_bytes == 32 << 20


def test_giving_back_nothing_changes_nothing() -> None:
    tensor = torch.ones(SIZE, dtype=torch.uint8)
    return_freed_memory()
    assert int(tensor.sum()) == SIZE
    assert resident_set_bytes() >= SIZE
