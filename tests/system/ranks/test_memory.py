"""What a rank takes while it trains, in bytes of its process beside its share of the model.

Measured: at most 116 MiB above the loaded rank at the peak, 38 MiB after a step. A rank whose experts compute all pairs
at once takes 146 to 151 MiB and 69 to 80. One that also kept whole inputs of layers and up to 1 GiB of freed memory
took 259 MiB at both. By themselves these two change less than the figures differ between runs: `test_split.py` and
`test_memory.py` in `unit/resident` notice them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kt_runtime.bench.train.model import checkpoint
from kt_runtime.bench.train.plan import Plan
from kt_runtime.cli.connection import resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings

MIB = 1 << 20
TOKENS, ROWS, STEPS = 2048, 4, 2
MOST_AT_PEAK, MOST_AFTER_A_STEP = 135 * MIB, 58 * MIB
OPTIONS = ["--tp-size", "2", "--expert-threads", "1", "--max-lora-rank", "8", "--dtype", "bfloat16"]


def batch(seed: int) -> Batch:
    rows = np.random.default_rng(seed).integers(3, 700, (ROWS, TOKENS // ROWS + 1)).tolist()
    return Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])


def bytes_of(pid: int, name: str) -> int:
    """VmRSS, or VmHWM: the most since the process began."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@pytest.mark.slow
def test_training_takes_little_memory_beside_a_ranks_share(tmp_path: Path) -> None:
    model = checkpoint(Plan(model="bench-qwen3-moe", layers=2), tmp_path)
    options = [*OPTIONS, "--microbatch-tokens", str(TOKENS), "--adapter-dir", str(tmp_path / "adapters")]
    with server(str(model), options, tmp_path / "log") as api:
        ranks: list[dict[str, Any]] = api.get("/kt/status")["ranks"]
        loaded = {rank["pid"]: bytes_of(rank["pid"], "VmRSS") for rank in ranks}
        with resident_client(api) as client:
            client.create_session("s", LoraSettings(rank=8, alpha=16.0, targets=["attention"], seed=5))
            for step in range(STEPS):
                client.forward_backward("s", batch(step))
                client.optim_step("s", 0.001)
            for pid, before in loaded.items():
                assert 0 < bytes_of(pid, "VmHWM") - before < MOST_AT_PEAK
                assert bytes_of(pid, "VmRSS") - before < MOST_AFTER_A_STEP
