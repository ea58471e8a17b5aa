"""Adapters on a GPU beside Hugging Face with the same adapter merged (tests/system/adapters/test_served.py)."""

from __future__ import annotations

from system.adapters.test_served import *  # noqa: F403

PLACES = ("deterministic", "no-graphs", "streamed")
