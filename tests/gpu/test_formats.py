"""Formats of the experts on a GPU: answers, training, agreement (tests/system/test_quantized_checkpoints.py)."""

from __future__ import annotations

from system.test_quantized_checkpoints import *  # noqa: F403

PLACES = ("deterministic", "hot", "streamed")
