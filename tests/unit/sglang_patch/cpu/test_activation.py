"""SGLang's SwiGLU, patched: training's bits for any batch."""

from __future__ import annotations

import pytest
import torch
from reference.drawn import drawn

from kt_runtime.ops.activation import silu_and_multiply


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_training_s_bits_for_any_batch(patched_sglang: None, dtype: torch.dtype) -> None:
    from sglang.srt.layers.activation import SiluAndMul

    x = drawn(37, 2 * 45, seed=0, dtype=dtype)
    gate, up = x.chunk(2, dim=-1)
    served = SiluAndMul().forward_native(x)
    assert served.dtype == dtype
    assert torch.equal(served, silu_and_multiply(gate.contiguous(), up.contiguous()))
    assert torch.equal(torch.cat([SiluAndMul().forward_native(row) for row in x.split(1)]), served)
