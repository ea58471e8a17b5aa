"""What every test of experts and linear layers does: one thread of PyTorch's own, and the defaults put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kt_runtime.experts import dense

torch.set_num_threads(1)


@pytest.fixture
def the_best_of_this_machine_afterwards() -> Iterator[None]:
    """For tests that choose an instruction set or a number of threads for linear layers."""
    yield
    dense.configure()
