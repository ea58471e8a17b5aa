"""Training as users run it, on a GPU's server (bodies: tests/system/training/test_training_runs.py)."""

from __future__ import annotations

from system.training.test_training_runs import *  # noqa: F403

PLACES = ("deterministic", "streamed")
