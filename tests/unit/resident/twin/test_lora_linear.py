from __future__ import annotations

import torch
from peft import LoraConfig
from reference.drawn import drawn

from kt_runtime.resident.twin.lora_linear import LoraLinear

BF16 = torch.bfloat16
SCALING = 2.0


def layer(dtype: torch.dtype) -> LoraLinear:
    g = torch.Generator().manual_seed(0)
    base = torch.nn.Linear(48, 40, bias=False, dtype=dtype).requires_grad_(False)
    base.weight.copy_(torch.randn(40, 48, generator=g) / 7)
    lora = LoraLinear(base, "one", LoraConfig(r=8, lora_alpha=16), r=8, lora_alpha=16)  # type: ignore[arg-type]
    lora.lora_A["one"].weight = torch.nn.Parameter(torch.randn(8, 48, generator=g) / 7)
    lora.lora_B["one"].weight = torch.nn.Parameter(torch.randn(40, 8, generator=g) / 3)
    return lora.eval()


def assert_same_sums(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal here; another BLAS may sum in another order, which is worth some roundings of float32."""
    torch.testing.assert_close(found, expected, rtol=0, atol=2.0**-22 * float(expected.detach().abs().max()))


def test_bf16_is_computed_as_serving_does_it() -> None:
    lora, x = layer(BF16), drawn(5, 30, 48, seed=1, dtype=BF16)
    (a, b, scaling), base = lora.active_lora()[0], lora.get_base_layer()
    assert scaling == SCALING
    with torch.no_grad():
        low = (SCALING * (x.double() @ a.to(BF16).double().T)).to(BF16)
        expected = (base(x).double() + low.double() @ b.to(BF16).double().T).to(BF16)
        found = lora(x)
    assert found.dtype == BF16
    assert (found != expected).float().mean() <= 0.001  # float32 sums may round the other way at a tie


def test_gradients_are_float32_sums_and_pass_as_if_masters_were_not_rounded() -> None:
    lora = layer(BF16)
    x = drawn(64, 48, seed=2, dtype=BF16)
    grad = drawn(64, 40, seed=3, dtype=BF16)
    a, b, _ = lora.active_lora()[0]
    by_a, by_b = torch.autograd.grad(lora(x), [a, b], grad)
    assert by_a.dtype == by_b.dtype == torch.float32
    wide, by_out = x.float(), grad.float()
    low = (SCALING * wide @ a.to(BF16).float().T).to(BF16).float()
    assert_same_sums(by_b, by_out.T @ low)
    by_low = (by_out @ b.to(BF16).float()).to(BF16).float()
    assert_same_sums(by_a, SCALING * by_low.T @ wide)


def test_float32_is_plain_lora() -> None:
    lora, x = layer(torch.float32), drawn(30, 48, seed=1)
    a, b, _ = lora.active_lora()[0]
    assert_same_sums(lora(x), lora.get_base_layer()(x) + SCALING * x @ a.T @ b.T)
