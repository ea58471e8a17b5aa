"""kt-runtime's side: a server started as users start it and trained over the wire protocol, and its peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from kt_runtime.bench.train.plan import LEARNING_RATE, Plan, lora_targets
from kt_runtime.bench.train.rows import Measured
from kt_runtime.cli.connection import resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import Activations, LoraSettings

CALL_TIMEOUT_S = 3600.0


def measure(
    plan: Plan,
    model: Path,
    dtype: str,
    sequences: npt.NDArray[np.int64],
    directory: Path,
    say: Callable[[str], None],
    extra: Sequence[str] = (),
) -> dict[tuple[str, str], Measured]:
    """The measurements by (targets, activations). The server has ended on return; its files are in `directory`.
    `extra`: further options of `kt-runtime serve`."""
    context = max(plan.tokens + 1, 64)
    options = ["--dtype", dtype, "--context-tokens", str(context), "--max-total-tokens", "1024"]
    options += ["--max-running-requests", "1", "--max-lora-rank", str(plan.rank), "--lora-slots", "2"]
    options += ["--microbatch-tokens", str(plan.microbatch_tokens), "--adapter-dir", str(directory / "adapters")]
    options += extra
    say(f"starting a server in {dtype}")
    found: dict[tuple[str, str], Measured] = {}
    with server(str(model), options, directory / "server.log") as api, resident_client(api, CALL_TIMEOUT_S) as client:
        processes = ProcessTree()
        for targets in plan.targets:
            for activations in plan.activations:
                processes.reset()
                seconds, losses = _train(client, plan, targets, activations, sequences)
                measured = Measured(seconds, losses, processes.peak_bytes())
                say(f"{targets}, {activations}: {measured.tokens_per_s(plan.step_tokens):.1f} tokens/s")
                found[targets, activations] = measured
    return found


def _train(
    client: ResidentClient, plan: Plan, targets: str, activations: Activations, sequences: npt.NDArray[np.int64]
) -> tuple[list[float], list[float]]:
    """(seconds of each counted step, losses of all steps)."""
    batch = _batch(sequences)
    session = f"bench-{targets.replace('+', '-')}-{activations}"
    lora = LoraSettings(rank=plan.rank, alpha=plan.alpha, targets=lora_targets(targets), seed=0)
    client.create_session(session, lora)
    seconds, losses = [], []
    for _ in range(plan.warmup_steps + plan.steps):
        started = time.perf_counter()
        ticket = client.begin_forward_backward(session, batch, activations=activations)  # as `kt-runtime train` does
        result = client.finish_forward(ticket, batch)
        client.optim_step(session, LEARNING_RATE)
        seconds.append(time.perf_counter() - started)
        losses.append(result.loss)
    client.close_session(session)
    return seconds[plan.warmup_steps :], losses


def _batch(sequences: npt.NDArray[np.int64]) -> Batch:
    """The batch for one step: every token but a sequence's last predicts the next; the loss is the step's mean."""
    count, tokens = sequences.shape
    weights = np.full((count, tokens), 1.0 / (count * (tokens - 1)))
    weights[:, -1] = 0.0
    return Batch.from_sequences(sequences.tolist(), np.roll(sequences, -1, axis=1).tolist(), weights.tolist())


class ProcessTree:
    """All descendants of this process, which are the server's processes. Shared pages count for each process.

    Linux: VmHWM, /proc/PID/clear_refs, which psutil does not know.
    """

    def __init__(self) -> None:
        self.processes = [child.pid for child in psutil.Process().children(recursive=True)]

    def reset(self) -> None:
        """Restarts the peaks from the current memory. If the system forbids that, peaks stay those since the start."""
        for process in self.processes:
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        return sum(peak_bytes(process) for process in self.processes)


def peak_bytes(process: int) -> int:
    """The process's VmHWM in bytes; 0 for a process that has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0
