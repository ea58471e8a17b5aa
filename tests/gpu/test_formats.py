"""Formats of the experts on a GPU (bodies: tests/system/serving/test_quantized_checkpoints.py)."""

from __future__ import annotations

from system.serving.test_quantized_checkpoints import *  # noqa: F403

PLACES = ("deterministic", "hot", "streamed")
