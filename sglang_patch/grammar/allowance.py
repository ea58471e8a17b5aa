"""Resource limits of grammars."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of one grammar, in seconds of CPU time and in bytes beyond the vocabulary, and of all grammars together.

    `match_cpu_s`: CPU time for one token of one request. `step_s`: how long the scheduler waits for all grammars of a
    batch before it ends the slowest. `least_cpu_s`: CPU time that each grammar may use even then (`step.py`). `wait_s`:
    wall-clock time that the scheduler waits for a grammar that gets no CPU time. `room_s`: how long a new grammar waits
    for others to end once `max_processes` or `max_bytes` is reached.
    """

    compile_cpu_s: float = 5.0
    compile_wait_s: float = 30.0
    compile_bytes: int = 256 * MIB
    match_cpu_s: float = 0.25
    match_bytes: int = 64 * MIB
    step_s: float = 0.5
    least_cpu_s: float = 0.01
    wait_s: float = 5.0
    room_s: float = 30.0
    max_processes: int = 64
    max_bytes: int = 1024 * MIB
