"""Memory that calls keep: given back when recent calls needed much less, or on demand. Counted in bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference.expert_problems import Problem, build_layer, random_problem
from torch import Tensor

from kt_runtime.experts import ExpertLayer, free_spare_memory
from kt_runtime.experts.native import spare_memory_bytes

# Windows (csrc/base/scratch.h): the rest of the large call's, the one that remembers it, and one more.
CALLS = 3 * 1024 + 1


def part(p: Problem, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return p.x[:tokens], p.ids[:tokens], p.weights[:tokens]


def forward(layer: ExpertLayer, p: Problem, tokens: int) -> Tensor:
    return layer.forward(*part(p, tokens))


def forward_and_backward(layer: ExpertLayer, p: Problem, tokens: int) -> Tensor:
    retained = layer.forward_retaining(*part(p, tokens))[1]
    return layer.backward(p.grad_out[:tokens], *part(p, tokens), retained=retained).x


def backward_alone(layer: ExpertLayer, p: Problem, tokens: int) -> Tensor:
    return layer.backward(p.grad_out[:tokens], *part(p, tokens)).x


@pytest.mark.slow
@pytest.mark.parametrize("call", [forward, forward_and_backward, backward_alone])
@pytest.mark.parametrize("num_experts", [2, 64])  # cut between threads; an expert is one task
def test_scratch_of_a_large_call_is_given_back_after_many_small_ones(
    call: Callable[[ExpertLayer, Problem, int], Tensor], num_experts: int
) -> None:
    p = random_problem(num_experts, 128, 256, 2048, 2)
    layer = build_layer(p.experts, num_threads=2)
    free_spare_memory()
    assert spare_memory_bytes() == 0
    call(layer, p, 1)
    small = spare_memory_bytes()
    wanted = call(layer, p, 2048)
    large = spare_memory_bytes()
    assert large > 50 * small and large > 2 << 20
    for _ in range(CALLS):
        call(layer, p, 1)
    assert 0 < spare_memory_bytes() <= 2 * small
    assert torch.equal(call(layer, p, 2048), wanted)


def test_scratch_is_kept_while_calls_need_it() -> None:
    p = random_problem(2, 128, 256, 512, 2)
    layer = build_layer(p.experts, num_threads=2)
    free_spare_memory()
    for _ in range(3):
        forward_and_backward(layer, p, 512)
    kept = spare_memory_bytes()
    for number in range(CALLS):
        forward_and_backward(layer, p, 512 if number % 200 == 0 else 1)
        assert spare_memory_bytes() >= kept


@pytest.mark.slow
def test_activations_of_many_layers_are_kept_for_the_next_step_and_no_more() -> None:
    p = random_problem(2, 64, 64, 128, 2)
    layer = build_layer(p.experts, num_threads=2)
    free_spare_memory()

    def step(layers: int) -> int:
        kept = [layer.forward_retaining(p.x, p.ids, p.weights)[1] for _ in range(layers)]
        held = sum(retained.bytes for retained in kept)
        kept.clear()
        return held

    held = step(40)
    for _ in range(CALLS // 40):
        step(40)
        assert spare_memory_bytes() >= held
    for _ in range(CALLS):
        step(2)
    assert spare_memory_bytes() < held // 4
