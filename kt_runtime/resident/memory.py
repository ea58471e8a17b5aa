"""How much memory this process takes, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path


def resident_set_bytes() -> int:
    """Resident set size of this process (proc(5), /proc/self/statm, second field)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
