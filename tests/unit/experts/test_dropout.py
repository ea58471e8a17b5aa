"""Dropout of LoRA on experts against the float64 reference, with masks made anew in numpy from the formula of
csrc/ops/pairs/dropout.cpp: splitmix64 of (seed, token, expert, projection, column)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from reference import moe
from reference.expert_problems import Problem, assert_close, build_layer, present, random_problem, tensors_of
from reference.instruction_sets import instruction_sets
from torch import Tensor

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import LoraSlot

STEP = np.uint64(0x9E3779B97F4A7C15)


def mixed(z: np.ndarray | np.uint64) -> Any:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def mask_of(slot: LoraSlot, token: int, expert: int, part: int, cols: int) -> Tensor:
    """0 or 1 / (1 - p) for each column."""
    with np.errstate(over="ignore"):
        of_token = mixed(np.uint64(slot.seed) + np.uint64(token + 1) * STEP)
        key = mixed(of_token + np.uint64(3 * expert + part))
        drawn = mixed(key + np.arange(1, cols + 1, dtype=np.uint64) * STEP) >> np.uint64(40)
    kept = drawn >= np.uint64(int(np.float32(slot.dropout).astype(np.float64) * 2**24))
    return torch.from_numpy(kept / (1 - float(np.float32(slot.dropout))))


def with_dropout(p: Problem, dropout: float = 0.3) -> Problem:
    seeds = (7, 2**64 - 1, 0)
    p.slots = [s and replace(s, dropout=dropout, seed=seed) for s, seed in zip(p.slots, seeds, strict=False)]
    return p


def reference_mask(p: Problem) -> moe.Mask:
    hidden, inner = p.x.shape[1], p.experts.gate.shape[1]
    return lambda slot, t, expert, part: mask_of(p.adapters[slot], t, expert, part, inner if part == 2 else hidden)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(4, 33, 17, 12, 2), (5, 160, 96, 70, 3)], ids=["small", "cut between threads"])
def test_forward_and_backward_are_those_of_the_reference(
    isa: str, dtype: torch.dtype, size: tuple[int, int, int, int, int]
) -> None:
    p = with_dropout(random_problem(*size, dtype=dtype, ranks=(4, 8)))
    x, weights = p.x.double().requires_grad_(), p.weights.double().requires_grad_()
    slots = [(tuple(t.double().requires_grad_() for t in tensors_of(slot)), slot.scaling) for slot in p.adapters]
    out = moe.routed_experts(
        p.experts, x, p.ids, weights, slots=slots, token_slots=p.token_slots, mask=reference_mask(p)
    )
    leaves = [x, weights, *(t for slot in slots for t in slot[0])]
    wanted = torch.autograd.grad(out, leaves, p.grad_out.double())

    layer = build_layer(p.experts, isa)
    found, retained = layer.forward_retaining(p.x, p.ids, p.weights, **p.lora)
    assert_close(found, out.detach(), isa)
    calls = [layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora, retained=kept) for kept in (retained, None)]
    of_call = [[g.x, g.weights, *(t for slot in g.slots for t in tensors_of(slot))] for g in calls]
    for kept, again, w in zip(*of_call, wanted, strict=True):
        assert torch.equal(kept, again)
        assert_close(kept, w, isa)


@pytest.mark.slow
def test_results_do_not_depend_on_threads_or_on_what_fits_into_memory_at_once() -> None:
    p = with_dropout(random_problem(2, 1024, 16, 12_000, 4, ranks=(2,)))
    whole = [build_layer(p.experts, None, threads).forward(p.x, p.ids, p.weights, **p.lora) for threads in (1, 3)]
    assert torch.equal(*whole)
    # The first rows alone fit into one chunk, in which they have the same places.
    assert torch.equal(
        build_layer(p.experts).forward(
            p.x[:4000], p.ids[:4000], p.weights[:4000], slots=p.slots, token_slots=present(p.token_slots)[:4000]
        ),
        whole[0][:4000],
    )


def test_masks_differ_between_tokens_experts_projections_and_seeds_and_drop_as_many_as_asked() -> None:
    slots = [LoraSlot(dropout=0.25, seed=seed) for seed in (1, 2)]
    masks = [
        mask_of(slot, token, expert, part, 4096)
        for slot in slots
        for token in (0, 1)
        for expert in (0, 1)
        for part in range(3)
    ]
    for index, mask in enumerate(masks):
        assert float((mask == 0).double().mean()) == pytest.approx(0.25, abs=0.03)
        assert float(mask.mean()) == pytest.approx(1, abs=0.04)
        for other in masks[:index]:
            both = float(((mask == 0) & (other == 0)).double().mean())
            assert both == pytest.approx(0.25**2, abs=0.02)  # independent


def test_gradients_hold_for_the_differentiable_operation() -> None:
    from kt_runtime.experts import routed_experts, routed_experts_for_backward

    p = with_dropout(random_problem(3, 24, 16, 9, 2, ranks=(4,)))
    layer, gradients = build_layer(p.experts), []
    for compute in (routed_experts, routed_experts_for_backward):
        slot = p.adapters[0].with_tensors([t.clone().requires_grad_() for t in tensors_of(p.slots[0])])
        out = compute(layer, p.x, p.ids, p.weights, slot)
        gradients.append(torch.autograd.grad(out, tensors_of(slot), p.grad_out))
    direct = layer.backward(
        p.grad_out, p.x, p.ids, p.weights, slots=p.slots, token_slots=torch.zeros(9, dtype=torch.int32)
    )
    for one, other, wanted in zip(*gradients, tensors_of(direct.slots[0]), strict=True):
        assert torch.equal(one, other) and torch.equal(one, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_of_down_alone_has_the_gradients_of_one_that_adds_nothing_to_gate_and_up(dtype: torch.dtype) -> None:
    p = with_dropout(random_problem(3, 64, 48, 9, 2, dtype=dtype, ranks=(4,)))
    slot = p.adapters[0]
    whole = replace(slot, gate_b=torch.zeros_like(present(slot.gate_b)), up_b=torch.zeros_like(present(slot.up_b)))
    down = replace(whole, gate_a=None, gate_b=None, up_a=None, up_b=None)
    layer, token_slots = build_layer(p.experts), torch.zeros(9, dtype=torch.int32)
    wanted, found = (
        layer.backward(p.grad_out, p.x, p.ids, p.weights, slots=[slot], token_slots=token_slots)
        for slot in (whole, down)
    )
    assert torch.equal(found.x, wanted.x) and torch.equal(found.weights, wanted.weights)
    for name in ("down_a", "down_b"):
        gradient = getattr(found.slots[0], name)
        assert gradient.count_nonzero() > 0 and torch.equal(gradient, getattr(wanted.slots[0], name))
    gradients = present(found.slots[0])
    assert gradients.gate_a is None and gradients.up_b is None


@pytest.mark.parametrize("dropout", [1.0, -0.1, float("nan")])
def test_a_dropout_that_is_no_probability_is_refused(dropout: float) -> None:
    p = with_dropout(random_problem(3, 24, 16, 9, 2, ranks=(4,)), dropout)
    with pytest.raises(InvalidValueError, match=r"slots\[0\]\.dropout is .*expected \[0, 1\)"):
        build_layer(p.experts).forward(p.x, p.ids, p.weights, **p.lora)
