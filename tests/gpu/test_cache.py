"""The prefix cache's tiers below a GPU's KV pool (bodies: tests/system/test_cache_tiers.py)."""

from __future__ import annotations

from system.test_cache_tiers import *  # noqa: F403

PLACES = ("deterministic",)
