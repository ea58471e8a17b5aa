"""Memory of a rank, compared with its share of the model: loaded, between training calls, and at the peak of one.

A process also holds code, SGLang and Python. A rank of a tiny model that has loaded holds these and little else, so its
memory is subtracted. Ratios are given twice: of the weights alone, and of weights and KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kt_runtime.bench.scale.plan import LOADED_MEMORY_BAR, TRAINING_MEMORY_BAR
from kt_runtime.bench.train.model import vocabulary
from kt_runtime.bench.train.server_side import CALL_TIMEOUT_S, peak_bytes
from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings

BASE_MODEL = "tiny-qwen3-moe"
LORA_RANK, STEPS, ROWS, ROW_TOKENS = 8, 4, 4, 128
"""A session on attention; each step has ROWS sequences of ROW_TOKENS, which are one microbatch."""
MOMENTS = ("loaded", "between_calls", "at_peak")


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank's process (resident set) at each of MOMENTS; of its weights; of its KV cache."""

    rank: int
    weight_bytes: int
    cache_bytes: int
    loaded: int
    between_calls: int
    at_peak: int


def ratios_of(rank: RankMemory, base_bytes: int, *, with_cache: bool) -> dict[str, float]:
    """What the process takes above `base_bytes`, over its weights, or over weights and KV cache; of each moment."""
    share = rank.weight_bytes + (rank.cache_bytes if with_cache else 0)
    return {moment: (getattr(rank, moment) - base_bytes) / share for moment in MOMENTS}


def figures_of(ranks: Sequence[RankMemory], base: Sequence[int]) -> dict[str, Any]:
    """`base`: bytes of the ranks of BASE_MODEL, loaded; the smallest is subtracted. Bars hold for the weights alone,
    and for the rank that takes most."""
    base_bytes = min(base)
    rows = [
        asdict(rank)
        | {"of_weights": ratios_of(rank, base_bytes, with_cache=False)}
        | {"of_weights_and_cache": ratios_of(rank, base_bytes, with_cache=True)}
        for rank in ranks
    ]
    largest = {
        of: {moment: max(row[of][moment] for row in rows) for moment in MOMENTS}
        for of in ("of_weights", "of_weights_and_cache")
    }
    bars = {moment: LOADED_MEMORY_BAR if moment == "loaded" else TRAINING_MEMORY_BAR for moment in MOMENTS}
    return {
        "base_model": BASE_MODEL,
        "base_bytes": base_bytes,
        "lora_rank": LORA_RANK,
        "microbatch_tokens": ROWS * ROW_TOKENS,
        "rows": rows,
        **largest,
        "bars": bars,
        "within_bar": all(largest["of_weights"][moment] <= bar for moment, bar in bars.items()),
    }


def measure_memory(
    model: Path, base_model: Path, num_ranks: int, dtype: str, directory: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """One server after the other, each of `num_ranks` ranks with one thread. Linux: VmHWM, /proc/PID/clear_refs."""
    say(f"memory of a rank of {BASE_MODEL}")
    with _ranks_of(base_model, num_ranks, dtype, directory / "base") as api:
        base = [_resident_bytes(rank["pid"]) for rank in api.get("/kt/status")["ranks"]]
    say("memory of a rank, loaded and training")
    with _ranks_of(model, num_ranks, dtype, directory / "trained") as api:
        return figures_of(_trained(api, vocabulary(model)), base)


@contextmanager
def _ranks_of(model: Path, num_ranks: int, dtype: str, directory: Path) -> Iterator[ServerAPI]:
    directory.mkdir()
    options = ["--tp-size", str(num_ranks), "--expert-threads", "1", "--dtype", dtype]
    options += ["--max-lora-rank", str(LORA_RANK), "--microbatch-tokens", str(ROWS * ROW_TOKENS)]
    options += ["--adapter-dir", str(directory / "adapters")]
    with server(str(model), options, directory / "server.log") as api:
        yield api


def _trained(api: ServerAPI, num_ids: int) -> list[RankMemory]:
    status = api.get("/kt/status")
    pids = {rank["rank"]: rank["pid"] for rank in status["ranks"]}
    loaded = {rank: _resident_bytes(pid) for rank, pid in pids.items()}
    with resident_client(api, CALL_TIMEOUT_S) as client:
        for pid in pids.values():
            with suppress(OSError):  # the peak is that since the start
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        client.create_session("bench", LoraSettings(rank=LORA_RANK, alpha=16.0, targets=["attention"], seed=0))
        for step in range(STEPS):
            client.forward_backward("bench", _batch(num_ids, step))
            client.optim_step("bench", 1e-3)
        between = {rank: _resident_bytes(pid) for rank, pid in pids.items()}
        peaks = {rank: peak_bytes(pid) for rank, pid in pids.items()}
    cache = _cache_bytes(status)
    return [
        RankMemory(n, rank["dense_bytes"] + rank["expert_bytes"], cache, loaded[n], between[n], peaks[n])
        for n, rank in sorted((rank["rank"], rank) for rank in status["ranks"])
    ]


def _cache_bytes(status: Mapping[str, Any]) -> int:
    """Bytes of the KV cache of each rank."""
    return sum(tier["capacity_bytes"] for tier in status["cache"] if tier["tier"] == "device")


def _resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def _batch(num_ids: int, seed: int) -> Batch:
    rows = np.random.default_rng(seed).integers(num_ids, size=(ROWS, ROW_TOKENS + 1)).tolist()
    return Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
