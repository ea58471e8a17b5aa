"""`plot_loss` draws what the log has values of, into the files that LLaMA-Factory names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kt_runtime.train.run.plots import plot, smoothed

HISTORY = [
    {"step": 1, "loss": 2.0, "rewards/accuracies": 0.5},
    {"step": 1, "eval_loss": 2.5, "eval_a_loss": 2.0, "eval_runtime": 1.0},
    {"step": 2, "loss": 1.0, "rewards/accuracies": 1.0},
    {"step": 2, "train_loss": 1.5},
]


@pytest.mark.slow
def test_one_png_for_each_curve(tmp_path: Path) -> None:
    files = plot(tmp_path, HISTORY, lambda line: None)
    names = ["training_loss", "training_eval_loss", "training_rewards_accuracies", "training_eval_a_loss"]
    assert [path.name for path in files] == [f"{name}.png" for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


def test_smoothing_grows_with_the_number_of_points() -> None:
    assert smoothed([1.0]) == [1.0]
    short, long = smoothed([0.0, 1.0]), smoothed([0.0] * 300 + [1.0])
    assert short[-1] > 0.95 and long[-1] < 0.15


def test_without_matplotlib_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said: list[str] = []
    assert plot(tmp_path, HISTORY, said.append) == [] and "pip install matplotlib" in said[0]
