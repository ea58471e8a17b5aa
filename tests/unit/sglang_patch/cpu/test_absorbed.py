"""SGLang's halves of `kv_b_proj`: `torch.bmm` with them has training's bits, everything else is torch's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reference.drawn import drawn

from kt_runtime.ops.matmul import frozen_heads
from kt_runtime.sglang_patch.cpu.absorbed import HeadWeights, _mark_weights

HEADS, KEY, LATENT, VALUE = 3, 24, 40, 16


def model(dtype: torch.dtype) -> SimpleNamespace:
    """w_kc [N, K, D] and w_vc [N, D, V] in SGLang's memory layout; the second layer has neither."""
    w_kc = drawn(HEADS, LATENT, KEY, seed=0, dtype=dtype).mT
    w_vc = drawn(HEADS, VALUE, LATENT, seed=1, dtype=dtype).mT
    layers = [SimpleNamespace(self_attn=SimpleNamespace(w_kc=w_kc, w_vc=w_vc)), SimpleNamespace()]
    return SimpleNamespace(model=SimpleNamespace(layers=layers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_training_s_bits_for_any_batch(dtype: torch.dtype) -> None:
    served = model(dtype)
    _mark_weights(None, served)
    attention = served.model.layers[0].self_attn
    query = drawn(33, HEADS, KEY + 8, seed=2, dtype=dtype)[..., :KEY]
    absorbed = torch.bmm(query.transpose(0, 1), attention.w_kc)
    assert type(absorbed) is torch.Tensor and absorbed.shape == (HEADS, 33, LATENT)
    trained = frozen_heads(query, attention.w_kc.as_subclass(torch.Tensor).mT.contiguous())
    assert torch.equal(absorbed.transpose(0, 1), trained)
    alone = torch.cat([torch.bmm(row.transpose(0, 1), attention.w_kc) for row in query.split(1)], dim=1)
    assert torch.equal(alone, absorbed)
    out = torch.empty(33, HEADS * VALUE, dtype=dtype)
    latent = drawn(33, HEADS, LATENT, seed=3, dtype=dtype)
    torch.bmm(latent.transpose(0, 1), attention.w_vc, out=out.view(-1, HEADS, VALUE).transpose(0, 1))
    assert torch.equal(out, frozen_heads(latent, attention.w_vc.as_subclass(torch.Tensor).mT).flatten(1))


def test_the_weights_stay_where_they_are_and_are_tensors_otherwise() -> None:
    served = model(torch.float32)
    attention = served.model.layers[0].self_attn
    before = attention.w_kc
    _mark_weights(None, served)
    _mark_weights(None, served)
    after = attention.w_kc
    assert type(after) is HeadWeights and after.data_ptr() == before.data_ptr() and after.stride() == before.stride()
    assert after.dtype == torch.float32 and type(after + 1) is torch.Tensor
    assert torch.equal(after.double().sum(), before.double().sum())
    x = drawn(HEADS, 5, KEY, seed=4, dtype=torch.float64)
    assert torch.equal(torch.bmm(x, after.double()), torch.bmm(x, before.double()))
