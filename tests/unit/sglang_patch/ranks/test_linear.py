"""Layers that SGLang splits by their inputs, and kt-runtime by their outputs: weights, biases, sums, LoRA's pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from reference.ranks.real_ranks import run_ranks

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import dense
from kt_runtime.ranks import Exchange
from kt_runtime.sglang_patch.ranks import group, linear

OUTPUTS, INPUTS, TOKENS = 24, 16, 3


def made(has_bias: bool, ranks: int, **changed: Any) -> Any:
    """As SGLang's `RowParallelLinear` is, once it is made on a rank."""
    bias = torch.nn.Parameter(torch.zeros(OUTPUTS)) if has_bias else None
    layer = SimpleNamespace(
        weight=torch.nn.Parameter(torch.empty(OUTPUTS, INPUTS // ranks)),
        bias=bias,
        input_size=INPUTS,
        output_size=OUTPUTS,
        input_is_parallel=True,
        reduce_results=False,
        tp_group="all",
    )
    vars(layer).update(changed)
    return layer


def as_sglang(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Its forward of a layer with one rank."""
    assert layer.tp_group is None
    return dense.linear(x, layer.weight.detach(), None if layer.bias is None else layer.bias.detach()), None


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_ranks_outputs_have_the_bits_of_one_process(has_bias: bool, reduces: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((OUTPUTS, INPUTS), (OUTPUTS,), (TOKENS, INPUTS))
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in shapes)

    def work(exchange: Exchange) -> torch.Tensor:
        layer = made(has_bias, exchange.share.num_ranks, reduce_results=reduces)
        with mock.patch.object(group, "exchange", lambda: exchange):
            linear.split_by_outputs(lambda layer: None, layer)
            layer.weight.weight_loader(layer.weight, weight)
            if has_bias:
                layer.bias.weight_loader(layer.bias, bias)
            out, _ = linear.forward_of_all_inputs(as_sglang, layer, exchange.share.columns_of(x).contiguous())
        assert layer.weight.shape == (OUTPUTS // exchange.share.num_ranks, INPUTS)
        return out

    expected = dense.linear(x, weight, bias if has_bias else None)
    found = run_ranks(2, work, "memory")
    if reduces:  # whole on each rank
        assert all(torch.equal(out, expected) for out in found)
    else:  # SGLang's layer boundary adds them up
        assert torch.equal(sum(found, torch.tensor(-0.0)), expected)


@pytest.mark.parametrize("changed", [{"input_is_parallel": False}, {"tp_group": None}])
def test_a_layer_that_is_not_split_is_refused(changed: dict[str, Any]) -> None:
    def work(exchange: Exchange) -> str:
        with mock.patch.object(group, "exchange", lambda: exchange), pytest.raises(InvalidValueError) as refusal:
            linear.split_by_outputs(lambda layer: None, made(False, 2, **changed))
        return str(refusal.value)

    for message in run_ranks(2, work, "memory"):
        assert f"a layer of {OUTPUTS} outputs can't be split over ranks" in message


def test_a_is_whole_and_b_has_the_rank_s_rows() -> None:
    """SGLang may read the inputs of `down_proj` from the layer, which has them all."""

    def whole_a(shape: tuple[int, ...], name: str, asks_layer: bool = False) -> tuple[int, ...]:
        pool = SimpleNamespace(_dense_local_dim=lambda *_: INPUTS if asks_layer else None)
        return linear.whole_a(shape, pool, name, None, 8, 0)

    with mock.patch.object(group, "num_ranks", lambda: 2):
        for name in ("o_proj", "out_proj", "down_proj"):
            assert whole_a((4, 8, INPUTS // 2), name) == (4, 8, INPUTS)
            assert linear.own_rows_of_b((4, OUTPUTS, 8), None, name) == (4, OUTPUTS // 2, 8)
        assert whole_a((4, 8, INPUTS), "down_proj", asks_layer=True) == (4, 8, INPUTS)
        assert linear.own_rows_of_b((4, OUTPUTS // 2, 8), None, "kv_a_proj_with_mqa") == (4, OUTPUTS, 8)
        for name in ("qkv_proj", "gate_up_proj", "down_proj_moe"):
            shape = (4, 8, 2, 3)
            assert whole_a(shape, name) == linear.own_rows_of_b(shape, None, name) == shape
