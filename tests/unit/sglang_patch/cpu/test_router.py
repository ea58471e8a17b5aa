"""Routing and norms against Hugging Face's modules, in bf16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from kt_runtime.ops.norms import rms_norm
from kt_runtime.sglang_patch.cpu.router import router_logits


def test_router_logits_are_float32_products_of_bf16_numbers() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 64, generator=g).bfloat16(), torch.randn(8, 64, generator=g).bfloat16()
    found = router_logits(SimpleNamespace(weight=weight), hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), hidden.double() @ weight.double().T, atol=1e-5, rtol=0)  # 1e-6 measured


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_round_as_hugging_face_does(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    theirs = Qwen3MoeRMSNorm(64, 1e-6).to(dtype)
    theirs.weight.data.copy_(torch.rand(64, generator=g) + 0.5)
    x = torch.randn(33, 64, generator=g).to(dtype)
    found, expected = rms_norm(x, theirs.weight, 1e-6), theirs(x)
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 4e-7, atol=0)
    if dtype == torch.bfloat16:
        assert (found != expected).float().mean() < 0.01
