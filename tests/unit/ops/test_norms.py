"""RMSNorm with a frozen weight: Hugging Face's numbers forward, the gradient of float64 backward."""

from __future__ import annotations

import pytest
import torch
from reference.decoder import inverse_rms
from reference.instruction_sets import instruction_sets
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RMSNorm
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from kt_runtime.experts import dense
from kt_runtime.resident.twin.frozen import FrozenRmsNorm, is_rms_norm

CLASSES = (Qwen3MoeRMSNorm, DeepseekV2RMSNorm, DeepseekV3RMSNorm)


def made(cls: type, size: int, dtype: torch.dtype) -> torch.nn.Module:
    module = cls(size, eps=1e-6).to(dtype)
    module.weight = torch.nn.Parameter(torch.randn(size).to(dtype), requires_grad=False)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", CLASSES)
def test_forward_is_hugging_faces(cls: type, dtype: torch.dtype) -> None:
    """But for the order of the sum of squares: 1 / rms may differ by a unit in float32's last place, or two."""
    torch.manual_seed(0)
    module, x = made(cls, 96, dtype), torch.randn(3, 7, 96).to(dtype)
    expected = module(x)
    assert is_rms_norm(module)
    module.__class__ = FrozenRmsNorm
    found = module(x)
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 4e-7, atol=0)
    if dtype == torch.bfloat16:
        assert (found != expected).sum() <= 1  # none of 2,016; float32 may round to the other side of a middle


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)])
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 4, 96)])
def test_gradient_is_float64s(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    """Largest error relative to the largest gradient: one rounding of the result, 2^-8 in bf16. Measured 2.5e-3."""
    torch.manual_seed(1)
    module = made(Qwen3MoeRMSNorm, shape[-1], dtype)
    module.__class__ = FrozenRmsNorm
    assert isinstance(module.weight, torch.Tensor)
    x = torch.randn(shape).to(dtype).requires_grad_()
    grad = torch.randn(shape).to(dtype)
    (found,) = torch.autograd.grad(module(x), x, grad)

    wide = x.detach().double().requires_grad_()
    exact = module.weight.double() * (wide * inverse_rms(wide, 1e-6))
    (expected,) = torch.autograd.grad(exact, wide, grad.double())
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_s_gradient_depends_neither_on_the_batch_nor_on_threads_nor_on_the_instruction_set(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(2)
    x, weight, by_out = torch.randn(900, 130).to(dtype), torch.randn(130).to(dtype), torch.randn(900, 130).to(dtype)
    inverse = dense.rms_norm_with_inverse(x, weight, 1e-6)[1]
    whole = dense.rms_norm_backward(by_out, x, weight, inverse)
    try:
        for isa in instruction_sets():
            for threads in (1, 3):
                dense.configure(isa, threads)
                assert torch.equal(dense.rms_norm_backward(by_out, x, weight, inverse), whole)
    finally:
        dense.configure()
    parts = [
        dense.rms_norm_backward(by_rows, rows, weight, r)
        for by_rows, rows, r in zip(by_out.split(7), x.split(7), inverse.split(7), strict=True)
    ]
    assert torch.equal(torch.cat(parts), whole)
