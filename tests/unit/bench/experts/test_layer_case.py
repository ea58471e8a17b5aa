"""Inputs, and references compared with those of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference import moe

from kt_runtime.bench.experts.checkpoint import prefix, write_checkpoint
from kt_runtime.bench.experts.layer_case import LayerCase, make_batches, make_lora, relative_error
from kt_runtime.bench.experts.measurement import Patience
from kt_runtime.bench.experts.plan import FORMATS, MLPS, SHAPES, BenchShape, make_plan
from kt_runtime.bench.experts.store_bench import StoreBench
from kt_runtime.errors import UnknownNameError
from kt_runtime.experts import ExpertShape, ExpertStore
from kt_runtime.experts.machine import MemoryReader


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


def the_tests_reference(case: LayerCase) -> moe.ReferenceExperts:
    gate, up = case.weights.gate_up.chunk(2, 1)
    return moe.ReferenceExperts(gate, up, case.weights.down)


def test_forward_is_that_of_the_tests_own_reference(case: LayerCase) -> None:
    few = case.few(16)
    wanted = moe.routed_experts(the_tests_reference(case), few.x, few.ids, few.weights)
    assert relative_error(case.expected(16), wanted) < 2e-15  # 2.3e-16 measured


def test_gradients_are_those_of_the_tests_own_reference(case: LayerCase) -> None:
    few, lora = case.few(16), case.lora
    x, weights = (t.double().requires_grad_() for t in (few.x, few.weights))
    leaves = [t.double().requires_grad_() for t in lora.tensors() if t is not None]
    slots = [(leaves, lora.scaling)]
    token_slots = torch.zeros(few.num_tokens, dtype=torch.int32)
    out = moe.routed_experts(the_tests_reference(case), x, few.ids, weights, slots=slots, token_slots=token_slots)
    out.backward(few.grad_out.double())
    got = case.expected_gradients(16)
    for gradient, leaf in zip([got.x, got.weights, *got.lora], [x, weights, *leaves], strict=True):
        assert leaf.grad is not None and relative_error(gradient, leaf.grad) < 2e-15  # 2.3e-16 measured


def test_errors_are_taken_over_four_tokens_at_most(case: LayerCase) -> None:
    assert [case.few(tokens).num_tokens for tokens in (1, 4, 64)] == [1, 4, 4]


@pytest.mark.parametrize("activation", MLPS)
@pytest.mark.parametrize("form", ["bf16", "q8_0"])
def test_every_activation_is_measured_and_its_error_is_that_of_rounding(
    shape: BenchShape, activation: str, form: str, tmp_path: Path
) -> None:
    case = LayerCase(shape.with_activation(MLPS[activation]))
    encoding = FORMATS[form].encoding
    write_checkpoint(tmp_path, encoding, case.weights)
    sizes = ExpertShape(shape.num_experts, shape.hidden, shape.intermediate)
    store = ExpertStore.load(tmp_path, {0: prefix(encoding)}, sizes, num_threads=1, mlp=case.shape.mlp)
    reader = MemoryReader(1 << 20)
    bench = StoreBench(case, FORMATS[form], store, Patience(1, 1e-9), reader)
    tolerance = 0.02 if form == "bf16" else 0.06
    rows = [row for op in ("forward", "forward_backward") for row in bench.rows(4, op)]
    assert all(row.rel_error < tolerance and len(row.timing.read_rates) == row.timing.runs + 1 for row in rows)
    # 4 tokens take all 8 experts: a pass of the reader, and the layer.
    assert {row.reuse_bytes for row in rows} == {store.resident_bytes + reader.bytes_at_once}


def test_an_unknown_activation_gets_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown activation 'gelo'.*gelu"):
        make_plan(activations=("gelo",), patience=Patience(1, 0.1))


def test_several_activations_are_several_shapes() -> None:
    plan = make_plan(shapes=["qwen3"], activations=["silu", "relu2", "silu"], patience=Patience(1, 0.1))
    assert [shape.name for shape in plan.shapes] == ["qwen3", "qwen3 relu2"]
    assert not plan.with_torch
