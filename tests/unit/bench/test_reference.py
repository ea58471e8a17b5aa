from __future__ import annotations

import torch
from reference import moe

from kt_runtime.bench.experts import reference
from kt_runtime.bench.experts.layer_case import LayerCase


def the_tests_reference(case: LayerCase) -> moe.ReferenceExperts:
    gate, up = case.weights.gate_up.chunk(2, 1)
    return moe.ReferenceExperts(gate, up, case.weights.down)


def test_forward_is_that_of_the_tests_own_reference(case: LayerCase) -> None:
    few = case.few(16)
    wanted = moe.routed_experts(the_tests_reference(case), few.x, few.ids, few.weights)
    assert reference.relative_error(case.expected(16), wanted) < 2e-15  # 2.3e-16 measured


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
        assert leaf.grad is not None and reference.relative_error(gradient, leaf.grad) < 2e-15  # 2.3e-16 measured


def test_errors_are_taken_over_four_tokens_at_most(case: LayerCase) -> None:
    assert [case.few(tokens).num_tokens for tokens in (1, 4, 64)] == [1, 4, 4]
