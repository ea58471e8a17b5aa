from __future__ import annotations

import pytest
import torch

from kt_runtime.bench.experts.layer_case import LayerCase
from kt_runtime.bench.experts.plan import BenchShape

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shape() -> BenchShape:
    return BenchShape("tiny", num_experts=8, top_k=2, hidden=128, intermediate=256, rank=4)


@pytest.fixture(scope="session")
def case(shape: BenchShape) -> LayerCase:
    return LayerCase(shape)
