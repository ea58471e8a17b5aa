"""What a run tells people and scripts: one line per logging step, `trainer_log.jsonl`, `train_results.json`.

`trainer_log.jsonl` has the keys that LLaMA-Factory writes, since users' scripts read them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from kt_runtime.files import write_json


class Journal:
    """Collects the losses between two lines. `say` prints a line for a person."""

    def __init__(
        self,
        directory: Path,
        total_steps: int,
        steps_per_epoch: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = directory / "trainer_log.jsonl"
        self._path.unlink(missing_ok=True)
        self._total, self._per_epoch, self._say, self._clock = total_steps, steps_per_epoch, say, clock
        self._started = clock()
        self._tokens = 0
        self.losses: list[float] = []
        self._unwritten: list[float] = []

    def step(self, loss: float, num_tokens: int, learning_rate: float, grad_norm: float, *, write: bool) -> None:
        """`loss`: mean over the step's trained tokens. `num_tokens`: all tokens computed in the step."""
        self.losses.append(loss)
        self._unwritten.append(loss)
        self._tokens += num_tokens
        if write:
            self._write(learning_rate, grad_norm)

    def finish(self, directory: Path) -> dict[str, Any]:
        """Writes `train_results.json` and `all_results.json`; returns what is in them."""
        seconds = self._clock() - self._started
        results = {
            "epoch": round(len(self.losses) / self._per_epoch, 4),
            "train_loss": sum(self.losses) / len(self.losses),
            "train_runtime": round(seconds, 4),
            "train_steps_per_second": round(len(self.losses) / seconds, 4),
            "train_tokens_per_second": round(self._tokens / seconds, 1),
        }
        for name in ("train_results.json", "all_results.json"):
            write_json(directory / name, results)
        return results

    def _write(self, learning_rate: float, grad_norm: float) -> None:
        done, elapsed = len(self.losses), self._clock() - self._started
        remaining = elapsed / done * (self._total - done)
        line = {
            "current_steps": done,
            "total_steps": self._total,
            "loss": round(sum(self._unwritten) / len(self._unwritten), 6),
            "lr": learning_rate,
            "epoch": round(done / self._per_epoch, 4),
            "percentage": round(100 * done / self._total, 2),
            "elapsed_time": str(timedelta(seconds=int(elapsed))),
            "remaining_time": str(timedelta(seconds=int(remaining))),
            "throughput": round(self._tokens / elapsed, 1) if elapsed else 0.0,
            "total_tokens": self._tokens,
        }
        self._unwritten.clear()
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._say(
            f"step {done}/{self._total}  loss {line['loss']:.4f}  lr {learning_rate:.2e}  |grad| {grad_norm:.3f}  "
            f"{line['throughput']:.0f} tokens/s  left {line['remaining_time']}"
        )
