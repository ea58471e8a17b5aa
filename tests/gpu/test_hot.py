"""Hot experts on a GPU."""

from __future__ import annotations

from reference.on_device.hot import *  # noqa: F403
