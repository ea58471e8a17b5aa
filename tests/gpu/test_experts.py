"""The expert store called with a GPU's tensors."""

from __future__ import annotations

from reference.on_device.experts import *  # noqa: F403
