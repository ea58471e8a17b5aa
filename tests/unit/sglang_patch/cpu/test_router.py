"""Routing and norms against Hugging Face's modules, in bf16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reference.drawn import drawn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from kt_runtime.ops.norms import rms_norm
from kt_runtime.ops.router import softmax_top_k
from kt_runtime.sglang_patch.cpu.router import router_logits


def test_router_logits_are_float32_products_of_bf16_numbers() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 64, generator=g).bfloat16(), torch.randn(8, 64, generator=g).bfloat16()
    found = router_logits(SimpleNamespace(weight=weight), hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), hidden.double() @ weight.double().T, atol=1e-5, rtol=0)  # 1e-6 measured


@pytest.mark.parametrize("normalise", [True, False])
def test_serving_and_training_choose_the_same_experts_with_the_same_bits(patched_sglang: None, normalise: bool) -> None:
    from sglang.srt.layers.moe.topk import TopKConfig, select_experts

    hidden, logits = torch.zeros(40, 4), drawn(40, 32, seed=1, dtype=torch.bfloat16)
    config = TopKConfig(top_k=5, renormalize=normalise, torch_native=True)
    served = select_experts(hidden, logits, config)
    weights, ids = softmax_top_k(logits, 5, normalise)
    assert torch.equal(served.topk_weights, weights) and torch.equal(served.topk_ids, ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_round_as_hugging_face_does(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    theirs = Qwen3MoeRMSNorm(64, 1e-6).to(dtype)
    theirs.weight.data.copy_(torch.rand(64, generator=g) + 0.5)
    x = torch.randn(33, 64, generator=g).to(dtype)
    found, expected = rms_norm(x, theirs.weight, 1e-6), theirs(x)
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 4e-7, atol=0)
    if dtype == torch.bfloat16:
        assert (found != expected).sum() <= 1  # none of 2,112; float32 may round to the other side of a middle
