"""The prefix cache's tiers below a GPU's KV pool (bodies: tests/system/cache/test_tiers.py)."""

from __future__ import annotations

from system.cache.test_tiers import *  # noqa: F403

PLACES = ("deterministic",)
