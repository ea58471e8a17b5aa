from __future__ import annotations

import pytest
import torch

from kt_runtime.bench.experts.inputs import make_batches, make_lora
from kt_runtime.bench.experts.shapes import SHAPES, BenchShape


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_a_token_has_distinct_experts_and_weights_that_sum_to_one(shape: BenchShape, tokens: int) -> None:
    for batch in make_batches(shape, tokens):
        assert batch.x.shape == (tokens, shape.hidden) and batch.x.dtype == torch.bfloat16
        assert batch.ids.shape == (tokens, shape.top_k)
        assert all(row.unique().numel() == shape.top_k for row in batch.ids)
        assert batch.ids.min() >= 0 and batch.ids.max() < shape.num_experts
        torch.testing.assert_close(batch.weights.sum(1), torch.ones(tokens), rtol=0, atol=1e-6)  # 1.2e-7 measured


@pytest.mark.parametrize("tokens", [1, 4])
def test_with_few_tokens_an_expert_comes_up_again_only_after_all_others(tokens: int) -> None:
    shape = SHAPES["dsv2lite"]
    called = torch.cat([batch.ids.flatten() for batch in make_batches(shape, tokens)]).tolist()
    for start in range(len(called) - shape.num_experts):
        assert len(set(called[start : start + shape.num_experts])) == shape.num_experts


def test_the_same_inputs_are_made_every_time(shape: BenchShape) -> None:
    first, second = (make_batches(shape, 4)[0] for _ in range(2))
    assert torch.equal(first.x, second.x) and torch.equal(first.ids, second.ids)


def test_lora_covers_all_projections(shape: BenchShape) -> None:
    lora = make_lora(shape)
    shapes = [tuple(t.shape) for t in lora.tensors() if t is not None]
    assert shapes == [(8, 4, 128), (8, 256, 4), (8, 4, 128), (8, 256, 4), (8, 4, 256), (8, 128, 4)]
    assert all(t is not None and t.abs().sum() > 0 for t in lora.tensors())
