"""Repeated requests to freeze objects keep no garbage. In Python processes of their own: a freeze lasts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

BEGIN = """
import gc, weakref
from kt_runtime.sglang_patch.freezing import Freezes

class Cycle:
    def __init__(self):
        self.itself = self

def original(context, gc_threshold=None):
    calls.append((context, gc_threshold))
    gc.freeze()

calls, freezes = [], Freezes()
gc.disable()  # no collection but those of the code below
"""


def told(code: str) -> str:
    made = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=60, check=True)
    return made.stdout.strip()


def test_the_first_freeze_happens_after_a_collection() -> None:
    code = """
garbage = weakref.ref(Cycle())
freezes(original, "Scheduler", (700, 10, 5))
print(garbage() is None, calls, gc.get_freeze_count() > 1000)
"""
    assert told(code) == "True [('Scheduler', (700, 10, 5))] True"


def test_the_first_freeze_of_a_process_reserves_memory_for_small_objects() -> None:
    code = """
import os
from kt_runtime.resident import memory
counts = [len(memory._reserved)]
for _ in range(2):
    freezes(original, "Scheduler")
    counts.append(len(memory._reserved))
if os.fork() == 0:
    freezes(original, "Scheduler")
    print(counts[0] == 0 < counts[1] == counts[2] < len(memory._reserved))
"""
    assert told(code) == "True"


def test_what_is_alive_at_repeated_freezes_is_collected_once_it_is_garbage() -> None:
    code = """
freezes(original, "Scheduler")
alive = []
for _ in range(50):
    alive.append(Cycle())
    freezes(original, "Scheduler", (800, 11, 6))
seen = [weakref.ref(one) for one in alive]
alive.clear()
gc.collect()
print(len(calls), sum(one() is not None for one in seen), gc.get_threshold())
"""
    assert told(code) == "1 0 (800, 11, 6)"


def test_the_number_of_freezes_is_bounded_by_how_many_objects_there_are_at_once() -> None:
    code = """
freezes(original, "Scheduler")
before = gc.get_freeze_count()
for _ in range(300):
    alive = [[] for _ in range(before // 2)]
    freezes(original, "Scheduler")
print(len(calls))
"""
    # The n-th after the first is the last if half of `before` is less than a tenth of 1 + n / 2 times `before`: n = 9.
    assert 9 <= int(told(code)) <= 11


def test_a_fork_of_a_process_with_frozen_objects_freezes_once() -> None:
    code = """
import os
freezes(original, "Frontend")
if os.fork() == 0:
    freezes(original, "Scheduler")
    freezes(original, "Scheduler")
    print([context for context, _ in calls], flush=True)
    os._exit(0)
os.wait()
"""
    assert told(code) == "['Frontend', 'Scheduler']"


def test_garbage_is_collected_soon_after_a_freeze() -> None:
    """CPython collects all objects once a quarter of those of the last time have survived: of half a million here."""
    code = """
alive = [[] for _ in range(500_000)]
freezes(original, "Scheduler")
garbage = Cycle()
seen = weakref.ref(garbage)
gc.collect(1)  # it is old now: only a collection of all objects finds it
del garbage
gc.enable()
alive += [[] for _ in range(100_000)]
print(seen() is None)
"""
    assert told(code) == "True"


def test_a_request_to_freeze_is_decided_once_in_a_process(patched_sglang: None) -> None:
    from sglang.srt.managers import detokenizer_manager, scheduler, tokenizer_manager

    functions: set[Any] = {module.freeze_gc for module in (detokenizer_manager, scheduler, tokenizer_manager)}
    [hooked] = functions
    assert not hasattr(hooked.__wrapped__, "__wrapped__")  # SGLang's own function
