"""A run's records for people and scripts: lines, the bar, trackers, and LLaMA-Factory's result files.

    trainer_log.jsonl       one line per logging step and evaluation, appended as the run goes
    trainer_state.json      Hugging Face's keys, `log_history` among them; also in every checkpoint
    train_results.json, eval_results.json, all_results.json

Checkpoints contain the journal's state: a resumed run's files equal those of an uninterrupted one, except for times.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from kt_runtime.files import write_file
from kt_runtime.train.run.cadence import Cadence
from kt_runtime.train.run.display import Display
from kt_runtime.train.run.result_files import add_results
from kt_runtime.train.run.trackers import Tracker
from kt_runtime.train.stages.objective import Outcome

LOG_FILE = "trainer_log.jsonl"
FLOPS_PER_PARAMETER_AND_TOKEN = 6  # forward 2, backward 4: Kaplan et al., 2020, arXiv 2001.08361, table 1
_SAVED = ("loss_sum", "loss_first", "unwritten", "num_tokens", "num_samples", "seconds")


class Journal:
    """`parameters`: parameters used per token, for `total_flos`. Counters continue from `restore`'s."""

    def __init__(
        self,
        directory: Path,
        cadence: Cadence,
        display: Display,
        trackers: Sequence[Tracker] = (),
        *,
        parameters: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._path = directory, directory / LOG_FILE
        self._cadence, self._display, self._trackers, self._clock = cadence, display, trackers, clock
        self._parameters = parameters
        self.done = 0
        self.history: list[dict[str, Any]] = []
        self.loss_sum = self.loss_first = self.seconds = 0.0
        self.loss_last = 0.0
        self.unwritten: list[dict[str, float]] = []
        self.num_tokens = self.num_samples = 0
        self._last_step: tuple[float, float] | None = None  # learning rate and gradient norm
        self._facts: Mapping[str, str] = {}
        self._start()

    def restore(self, step: int, history: Sequence[dict[str, Any]], state: Mapping[str, Any]) -> None:
        """Resumes after `step`. Removes lines of later steps from the log file, since those steps will run again.

        `history`: the checkpoint's `log_history`. `state`: a result of the method `state`.
        """
        for name in _SAVED:
            setattr(self, name, state[name])
        self.done, self.loss_last, self.history = step, state["loss_last"], list(history)
        self._start()
        kept = [line for line in _lines(self._path) if line["current_steps"] <= step]
        write_file(self._path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def begin(self) -> None:
        """Starts a new log file."""
        self._path.unlink(missing_ok=True)

    def state(self) -> dict[str, Any]:
        """The input of `restore` that `trainer_state` does not have. JSON values; floats are restored bit for bit."""
        return {
            **{name: getattr(self, name) for name in _SAVED if name != "seconds"},
            "loss_last": self.loss_last,
            "seconds": self._elapsed(),
        }

    # During the run.

    def step(self, outcome: Outcome, learning_rate: float, grad_norm: float) -> None:
        if not self.done:
            self.loss_first = outcome.loss
        self.done += 1
        self.loss_last = outcome.loss
        self.loss_sum += outcome.loss
        self.num_tokens += outcome.num_tokens
        self.num_samples += outcome.num_samples
        self.unwritten.append({"loss": outcome.loss, **outcome.metrics})
        self._last_step = learning_rate, grad_norm
        self._facts = outcome.facts
        if self._cadence.logs(self.done):
            self._write_step(learning_rate, grad_norm)
        first = {"reward": f"{outcome.metrics['reward']:.3f}"} if "reward" in outcome.metrics else {}
        facts = {
            **first,
            "loss": f"{outcome.loss:.4f}",
            "tokens/s": f"{self._throughput():.0f}",
            "left": self._remaining(),
        }
        self._display.progress(self.done, self._cadence.total_steps, facts)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """`metrics`: a result of `Evaluator.run`."""
        self._record(metrics)
        losses = {key: value for key, value in metrics.items() if _is_figure(key)}
        self._append({**losses, **self._position()})
        shown = "  ".join(f"{key} {value:.4f}" for key, value in losses.items())
        self._display.say(f"step {self.done}/{self._cadence.total_steps}  evaluation: {shown}")

    def trainer_state(self, **best: Any) -> dict[str, Any]:
        """Hugging Face's `trainer_state.json`. `best`: its keys for the best checkpoint."""
        recipe = self._cadence.recipe
        return {
            "best_global_step": None,
            "best_metric": None,
            "best_model_checkpoint": None,
            **best,
            "epoch": self._cadence.epoch(self.done),
            "eval_steps": self._cadence.eval_steps,
            "global_step": self.done,
            "is_hyper_param_search": False,
            "is_local_process_zero": True,
            "is_world_process_zero": True,
            "log_history": self.history,
            "logging_steps": self._cadence.logging_steps,
            "max_steps": self._cadence.total_steps,
            "num_input_tokens_seen": self.num_tokens,
            "num_train_epochs": recipe.num_train_epochs,
            "save_steps": self._cadence.save_steps,
            "stateful_callbacks": {},
            "total_flos": self._flops(),
            "train_batch_size": recipe.per_device_train_batch_size,
            "trial_name": None,
            "trial_params": None,
        }

    # At the end.

    def finish(self) -> dict[str, Any]:
        """Writes `train_results.json` and `all_results.json`; returns their new values.

        Also writes a line for steps since the last line: a run may stop early, between two logging steps.
        """
        if self.unwritten and self._last_step is not None:
            self._write_step(*self._last_step)
        seconds = max(self._elapsed(), 1e-9)
        results: dict[str, Any] = {
            "epoch": self._cadence.epoch(self.done),
            "total_flos": self._flops(),
            "train_loss": self.loss_sum / max(self.done, 1),
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(self.num_samples / seconds, 3),
            "train_steps_per_second": round(self.done / seconds, 3),
        }
        if self._cadence.recipe.include_effective_tokens_per_second:
            results["effective_tokens_per_sec"] = self.num_tokens / seconds
        self._record(results)
        add_results(self._directory, "train_results.json", results)
        return results

    def finish_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Writes `eval_results.json`, and adds it to `all_results.json`."""
        add_results(self._directory, "eval_results.json", {"epoch": self._cadence.epoch(self.done), **metrics})

    # Implementation.

    def _start(self) -> None:
        self._started, self._done_before, self._tokens_before = self._clock(), self.done, self.num_tokens

    def _elapsed(self) -> float:
        return self.seconds + self._clock() - self._started

    def _throughput(self) -> float:
        seconds = self._clock() - self._started
        return (self.num_tokens - self._tokens_before) / seconds if seconds > 0 else 0.0

    def _remaining(self) -> str:
        done = self.done - self._done_before
        seconds = (self._clock() - self._started) / done * (self._cadence.total_steps - self.done) if done else 0.0
        return str(timedelta(seconds=int(seconds)))

    def _flops(self) -> float:
        return float(FLOPS_PER_PARAMETER_AND_TOKEN * self._parameters * self.num_tokens)

    def _position(self) -> dict[str, Any]:
        total = self._cadence.total_steps
        return {
            "epoch": round(self._cadence.epoch(self.done), 4),
            "percentage": round(100 * self.done / total, 2) if total else 100.0,
            "elapsed_time": str(timedelta(seconds=int(self._elapsed()))),
            "remaining_time": self._remaining(),
        }

    def _write_step(self, learning_rate: float, grad_norm: float) -> None:
        names = self.unwritten[0]
        means = {name: sum(values[name] for values in self.unwritten) / len(self.unwritten) for name in names}
        self.unwritten = []
        self._record({**means, "grad_norm": grad_norm, "learning_rate": learning_rate})
        accuracy = {"accuracy": means["rewards/accuracies"]} if "rewards/accuracies" in means else {}
        has_rewards = "reward" in means  # reinforcement learning: all of its figures, since the loss says little
        shown = means if has_rewards else {"loss": means["loss"], **accuracy}
        line = {**shown, **self._facts, "lr": learning_rate, **self._position()}
        self._append({**line, "throughput": round(self._throughput(), 2), "total_tokens": self.num_tokens})
        accurate = f"accuracy {accuracy['accuracy']:.3f}  " if accuracy else ""
        if has_rewards:
            accurate = f"reward {means['reward']:.4f}  kl/k3 {means['kl/k3']:.2e}  "
        figures = f"loss {means['loss']:.4f}  {accurate}lr {learning_rate:.2e}  |grad| {grad_norm:.3f}"
        speed = f"{self._throughput():.0f} tokens/s  left {self._remaining()}"
        self._display.say(f"step {self.done}/{self._cadence.total_steps}  {figures}  {speed}")

    def _record(self, values: Mapping[str, float]) -> None:
        self.history.append({**values, "epoch": self._cadence.epoch(self.done), "step": self.done})
        for tracker in self._trackers:
            tracker.log(self.done, values)

    def _append(self, values: Mapping[str, Any]) -> None:
        line = {"current_steps": self.done, "total_steps": self._cadence.total_steps, **values}
        with self._path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _is_figure(key: str) -> bool:
    return not key.endswith(("_runtime", "_per_second"))


def _lines(path: Path) -> list[dict[str, Any]]:
    """The log's lines, without a truncated last one."""
    lines = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            parsed = json.loads(line)
        except ValueError:
            continue
        if isinstance(parsed, dict) and isinstance(parsed.get("current_steps"), int):
            lines.append(parsed)
    return lines
