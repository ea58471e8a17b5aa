"""Publishing under streams on a GPU: also a version that is published after graphs were captured is what answers.

The bodies are those of a CPU (tests/system/adapters/test_publish_under_streams.py).
"""

from __future__ import annotations

from system.adapters.test_publish_under_streams import *  # noqa: F403

PLACES = ("deterministic", "no-graphs")
