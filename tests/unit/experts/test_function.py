"""routed_experts: gradients reach x, routing weights and adapters, as torch's own autograd gives them in float32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from reference.expert_problems import Problem, build_layer, present, random_problem, tensors_of
from reference.moe import ReferenceExperts
from torch import Tensor
from torch.nn.functional import silu

from kt_runtime.experts import LoraSlot, free_spare_memory, routed_experts, routed_experts_for_backward
from kt_runtime.resident.memory import resident_set_bytes, return_freed_memory

TOLERANCE = 3e-6  # 3.6e-7 is measured


def plain_torch(experts: ReferenceExperts, x: Tensor, ids: Tensor, weights: Tensor, lora: LoraSlot) -> Tensor:
    """The same in float32 torch operations, expert by expert."""
    gate, up, down = experts.gate.float(), experts.up.float(), experts.down.float()

    def linear(weight: Tensor, rows: Tensor, a: Tensor | None, b: Tensor | None, expert: int) -> Tensor:
        y = rows @ weight[expert].T
        return y if a is None or b is None else y + lora.scaling * ((rows @ a[expert].float().T) @ b[expert].float().T)

    out = torch.zeros(x.shape)
    for expert in range(gate.shape[0]):
        token, position = torch.where(ids == expert)
        rows = x.float()[token]
        g = linear(gate, rows, lora.gate_a, lora.gate_b, expert)
        u = linear(up, rows, lora.up_a, lora.up_b, expert)
        y = linear(down, silu(g) * u, lora.down_a, lora.down_b, expert)
        out = out.index_add(0, token, weights[token, position, None] * y)
    return out


def gradients(
    run: Callable[[Tensor, Tensor, LoraSlot], Tensor], p: Problem, lora_dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    x, weights = p.x.clone().requires_grad_(), p.weights.clone().requires_grad_()
    tensors = [t.detach().to(lora_dtype).requires_grad_() for t in tensors_of(p.slots[0])]
    out = run(x, weights, LoraSlot(scaling=0.75).with_tensors(tensors))
    (out * p.grad_out).sum().backward()
    return out.detach(), [present(t.grad) for t in (x, weights, *tensors)]


@pytest.mark.parametrize(("hidden", "inner", "tokens"), [(33, 17, 9), (128, 64, 120)])
def test_gradients_equal_those_of_plain_torch(hidden: int, inner: int, tokens: int) -> None:
    p = random_problem(5, hidden, inner, tokens, 3, ranks=(6,))
    layer = build_layer(p.experts)
    got, got_grads = gradients(lambda x, w, lora: routed_experts(layer, x, p.ids, w, lora), p, torch.float32)
    want, want_grads = gradients(lambda x, w, lora: plain_torch(p.experts, x, p.ids, w, lora), p, torch.float32)
    for g, w in zip([got, *got_grads], [want, *want_grads], strict=True):
        assert (g - w).norm() <= TOLERANCE * w.norm()


def test_gradients_of_bfloat16_adapters_have_their_dtype() -> None:
    p = random_problem(3, 32, 16, 8, 2, ranks=(4,))
    layer = build_layer(p.experts)
    _, grads = gradients(lambda x, w, lora: routed_experts(layer, x, p.ids, w, lora), p, torch.bfloat16)
    assert [g.dtype for g in grads] == [torch.float32] * 2 + [torch.bfloat16] * 6


def test_only_what_requires_gradients_gets_them() -> None:
    p = random_problem(3, 32, 16, 8, 2, ranks=(4,))
    layer = build_layer(p.experts)
    slot = p.adapters[0]
    up_b = present(slot.up_b).requires_grad_()
    routed_experts(layer, p.x, p.ids, p.weights, slot).sum().backward()
    assert up_b.grad is not None and up_b.grad.abs().sum() > 0
    assert p.x.grad is None and present(slot.gate_a).grad is None


def test_without_an_adapter_x_gets_its_gradient() -> None:
    p = random_problem(3, 32, 16, 8, 2)
    layer = build_layer(p.experts)
    x = p.x.clone().requires_grad_()
    # A summed output has an expanded gradient, whose last stride is zero.
    routed_experts(layer, x, p.ids, p.weights, None).sum().backward()
    wanted = layer.backward(torch.ones_like(p.x), p.x, p.ids, p.weights).x
    assert torch.equal(present(x.grad), wanted)


def test_ten_sgd_steps_lower_a_loss() -> None:
    p = random_problem(4, 48, 32, 30, 2, ranks=(8,))
    layer = build_layer(p.experts)
    tensors = [t.clone().requires_grad_() for t in tensors_of(p.slots[0])]
    optimizer = torch.optim.SGD(tensors, lr=0.05)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        slot = LoraSlot().with_tensors(tensors)
        loss = (routed_experts(layer, p.x, p.ids, p.weights, slot) - p.grad_out).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(after < before for before, after in pairwise(losses))


@pytest.mark.parametrize("retain", [True, False])
def test_for_backward_alone_nothing_is_computed_forward_and_gradients_are_the_same_bits(retain: bool) -> None:
    p = random_problem(5, 64, 32, 40, 2, ranks=(6,))
    layer = build_layer(p.experts)
    _, want = gradients(lambda x, w, lora: routed_experts(layer, x, p.ids, w, lora, retain=retain), p, torch.float32)
    out, got = gradients(lambda x, w, lora: routed_experts_for_backward(layer, x, p.ids, w, lora), p, torch.float32)
    assert not out.any()
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


@pytest.mark.slow
def test_memory_of_retained_activations_is_kept_for_the_next_call_until_it_is_given_back() -> None:
    p = random_problem(4, 64, 1024, 2048, 4)
    layer = build_layer(p.experts)
    retained = [layer.forward_retaining(p.x, p.ids, p.weights)[1] for _ in range(2)]
    held = sum(each.bytes for each in retained)
    retained.clear()
    before = resident_set_bytes()
    free_spare_memory()
    return_freed_memory()  # the C library may have been told to keep it, by a test before this one
    assert before - resident_set_bytes() > held // 2 > 1 << 25
