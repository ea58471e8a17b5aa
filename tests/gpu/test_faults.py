"""Requests that a GPU's engine fails at end alone (bodies: tests/system/serving/test_engine_faults.py)."""

from __future__ import annotations

from system.serving.test_engine_faults import *  # noqa: F403
from system.serving.test_engine_faults import pytestmark  # noqa: F401

PLACES = ("deterministic", "no-graphs")
