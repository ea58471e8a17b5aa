"""`plot_loss`: curves of a run's log as PNG files, named as LLaMA-Factory names them.

Raw values are pale. Above them is an exponential moving average, whose weight grows with the number of points from 0
for a few towards 0.9 for hundreds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

KEYS = (
    *("loss", "eval_loss", "eval_accuracy", "rewards/accuracies"),
    *("reward", "kl/k1", "kl/k3", "kl/reference", "completions/mean_length", "eval_reward"),
)
SMOOTHING, SMOOTHING_RATE = 1.8, 0.05


def plot(directory: Path, history: Sequence[Mapping[str, Any]], say: Callable[[str], None]) -> list[Path]:
    """Draws each of `KEYS`, and every dataset's own eval loss, if the log has its values; returns the files."""
    try:
        import matplotlib
    except ImportError:
        say("plot_loss: matplotlib is not installed, so there is no plot; `pip install matplotlib` brings it")
        return []
    matplotlib.use("Agg")
    files = []
    for key in _keys(history):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        if points:
            files.append(_draw(directory, key, points))
    return files


def smoothed(values: Sequence[float]) -> list[float]:
    """The moving average, of the same length as `values`."""
    weight = SMOOTHING * (1 / (1 + math.exp(-SMOOTHING_RATE * len(values))) - 0.5)
    result: list[float] = []
    for value in values:
        last = result[-1] if result else value
        result.append(last * weight + (1 - weight) * value)
    return result


def _keys(history: Sequence[Mapping[str, Any]]) -> list[str]:
    of_datasets = sorted(
        {key for entry in history for key in entry if key.startswith("eval_") and key.endswith("_loss")}
    )
    return [*KEYS, *(key for key in of_datasets if key not in KEYS)]


def _draw(directory: Path, key: str, points: list[tuple[int, float]]) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, values = [step for step, _ in points], [value for _, value in points]
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, values, color="#1f77b4", alpha=0.4, label="original")
    axes.plot(steps, smoothed(values), color="#1f77b4", label="smoothed")
    axes.set_title(f"training {key} of {directory.name}")
    axes.set_xlabel("step")
    axes.set_ylabel(key)
    axes.legend()
    path = directory / f"training_{key.replace('/', '_')}.png"
    figure.savefig(path, format="png", dpi=100)
    return path
