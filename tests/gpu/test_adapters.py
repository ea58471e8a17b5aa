"""Adapters on a GPU beside Hugging Face with the same adapter merged (tests/system/test_adapters_served.py)."""

from __future__ import annotations

from system.test_adapters_served import *  # noqa: F403

PLACES = ("deterministic", "no-graphs", "streamed")
