"""Greedy answers of a GPU's servers in float32 are those of Hugging Face, cached or not, alone or batched.

The bodies are those of a CPU (tests/system/serving/test_serving_parity.py).
"""

from __future__ import annotations

from system.serving.test_serving_parity import *  # noqa: F403

PLACES = ("deterministic", "no-graphs", "streamed")
