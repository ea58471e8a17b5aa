"""Gated DeltaNet layers of the twin: against Hugging Face's, and rows that fork against two rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference.delta_net import hugging_face_in_float64
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from kt_runtime.resident.twin import delta_net
from kt_runtime.resident.twin.batches import Branch

PREFIX, SECOND, LENGTH = 7, 12, 19


def layer() -> Any:
    config = Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=12,
    )
    torch.manual_seed(1)
    made = Qwen3NextDecoderLayer(config, 0)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(False)
        if name.endswith(("gate_up_proj", "down_proj", "gate.weight", "A_log")):
            parameter.normal_(std=0.3)
    return made


@pytest.fixture
def native() -> Any:
    made = layer()
    delta_net.compute_natively(made)
    return made.linear_attn


def gradient_of(module: Any, hidden: torch.Tensor, by_out: torch.Tensor, **more: Any) -> list[torch.Tensor]:
    """The output and the input's gradient."""
    hidden = hidden.clone().requires_grad_()
    out = module(hidden, **more)
    return [out.detach(), *torch.autograd.grad(out, [hidden], by_out)]


def test_it_equals_hugging_face_s_layer(native: Any) -> None:
    hidden, by_out = torch.randn(2, 3, LENGTH, 32, generator=torch.Generator().manual_seed(2))
    with hugging_face_in_float64():
        expected = gradient_of(layer().linear_attn, hidden, by_out)
    for ours, theirs in zip(gradient_of(native, hidden, by_out), expected, strict=True):
        assert (ours - theirs).abs().max() <= 4e-6 * theirs.abs().max()  # 4.2e-7 measured


def test_a_row_that_forks_is_two_rows_with_one_prefix(native: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, by_out = torch.randn(2, 2, LENGTH, 32, generator=generator)
    branches = (Branch(PREFIX, SECOND), Branch(0, LENGTH))
    out, by_hidden = gradient_of(native, hidden, by_out, branches=branches)
    second = torch.cat([hidden[:1, :PREFIX], hidden[:1, SECOND:]], dim=1)
    by_second = torch.cat([torch.zeros(1, PREFIX, 32), by_out[:1, SECOND:]], dim=1)
    of_first, by_first = gradient_of(native, hidden[:1, :SECOND], by_out[:1, :SECOND])
    of_second, by_rest = gradient_of(native, second, by_second)
    of_other, by_other = gradient_of(native, hidden[1:], by_out[1:])
    assert torch.equal(out[:1, :SECOND], of_first) and torch.equal(out[:1, SECOND:], of_second[:, PREFIX:])
    assert torch.equal(out[1:], of_other) and torch.equal(by_hidden[1:], by_other)
    assert torch.equal(by_hidden[:1, SECOND:], by_rest[:, PREFIX:])
    both = by_first.clone()
    both[:, :PREFIX] += by_rest[:, :PREFIX]
    torch.testing.assert_close(by_hidden[:1, :SECOND], both, rtol=0, atol=5e-6)
