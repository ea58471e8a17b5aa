"""The expert store called with a GPU's tensors."""

from __future__ import annotations

from reference.experts_on_device import *  # noqa: F403
