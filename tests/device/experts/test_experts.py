"""The expert store called with the emulated device's tensors, under every schedule."""

from __future__ import annotations

import pytest
import torch
from reference.on_device.experts import *  # noqa: F403


@pytest.fixture
def device(scheduled_device: torch.device) -> torch.device:
    return scheduled_device
