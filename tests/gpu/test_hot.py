"""Hot experts on a GPU."""

from __future__ import annotations

from reference.hot_on_device import *  # noqa: F403
