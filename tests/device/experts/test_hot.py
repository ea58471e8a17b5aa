"""Hot experts on the emulated device, under every schedule."""

from __future__ import annotations

import pytest
import torch
from reference.on_device.hot import *  # noqa: F403


@pytest.fixture
def device(scheduled_device: torch.device) -> torch.device:
    return scheduled_device
