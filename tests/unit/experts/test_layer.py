"""ExpertLayer.forward and backward against the float64 reference, on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import moe
from reference.cases import choose, examples
from reference.expert_problems import (
    TOLERANCES,
    Lora,
    Problem,
    assert_close,
    build_layer,
    present,
    random_problem,
    tensors_of,
)
from reference.instruction_sets import instruction_sets
from torch import Tensor

from kt_runtime.errors import InvalidValueError, NumericsError
from kt_runtime.experts import ExpertLayer, LoraSlot

EDGES = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 47, 65])
Change = Callable[[dict[str, Any]], None]
SETTINGS = settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "num_experts": draw(st.integers(1, 5)),
        "hidden": draw(EDGES),
        "inner": draw(EDGES),
        "tokens": draw(st.sampled_from([0, 1, 2, 7, 13])),
        "top_k": draw(st.integers(1, 3)),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "ranks": draw(st.sampled_from([(), (4,), (1, 8), (3, 0, 17)])),
        "lora_dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "id_dtype": draw(st.sampled_from([torch.int32, torch.int64])),
        "seed": draw(st.integers(0, 1000)),
    }


def as_reference(slots: Sequence[LoraSlot | None]) -> list[moe.Lora | None]:
    return [None if slot is None else (slot.tensors(), slot.scaling) for slot in slots]


def reference(p: Problem, off: torch.Generator | None = None) -> list[Tensor]:
    """The result, and its gradients with respect to x, the routing weights and the adapters. `off`: each input is off
    by about a rounding to float32."""

    def given(tensor: Tensor) -> Tensor:
        wide = tensor.double()
        return wide if off is None else wide * (1 + 2.0**-24 * torch.randn(wide.shape, generator=off).double())

    experts = replace(p.experts, gate=given(p.experts.gate), up=given(p.experts.up), down=given(p.experts.down))
    slots = as_reference([s and s.with_tensors([given(t).requires_grad_() for t in tensors_of(s)]) for s in p.slots])
    x, weights = given(p.x).requires_grad_(), given(p.weights).requires_grad_()
    out = moe.routed_experts(experts, x, p.ids, weights, slots=slots, token_slots=p.token_slots)
    leaves = [x, weights, *(present(t) for slot in slots if slot for t in slot[0])]
    gradients = torch.autograd.grad(out, leaves, given(p.grad_out), allow_unused=True)
    return [out.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(gradients, leaves, strict=True))]


def check(found: list[Tensor], p: Problem, wanted: list[Tensor], what: str) -> None:
    """Some sums of drawn cases cancel, such as those of the gradient of an A of rank 1 for one token. The terms are as
    large as the reference moves where its inputs are off."""
    pairs, factors = list(zip(found, wanted, strict=True)), [0.0] * len(found)
    if any((f.double() - w).norm() > TOLERANCES[f.dtype] * w.norm() for f, w in pairs):
        moved = [reference(p, torch.Generator().manual_seed(seed)) for seed in range(4)]
        factors = [2.0**24 * max(float((m[at] - w).norm()) for m in moved) for at, (_, w) in enumerate(pairs)]
    for (f, w), factor in zip(pairs, factors, strict=True):
        assert_close(f, w, what, factor)


def forward(layer: ExpertLayer, p: Problem, rows: slice | Tensor = slice(None)) -> Tensor:
    token_slots = None if p.token_slots is None else p.token_slots[rows]
    return layer.forward(p.x[rows], p.ids[rows], p.weights[rows], slots=p.slots, token_slots=token_slots)


@SETTINGS
@given(case=cases())
def test_forward_and_backward_are_the_reference(case: dict[str, Any]) -> None:
    """On every instruction set: each has the same reference."""
    p = random_problem(**case)
    wanted = reference(p)
    for isa in instruction_sets():
        layer = build_layer(p.experts, isa)
        out = forward(layer, p)
        assert out.dtype == p.x.dtype and out.shape == p.x.shape, isa
        got = layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora)
        assert [s is None for s in got.slots] == [s is None for s in p.slots], isa
        lora = [t for slot in got.slots if slot for t in tensors_of(slot)]
        assert got.x.dtype == p.x.dtype, isa
        assert all(t.dtype == torch.float32 for t in [got.weights, *lora]), isa
        check([out, got.x, got.weights, *lora], p, wanted, isa)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_alone_gives_the_same_bits_as_in_any_batch(isa: str, dtype: torch.dtype) -> None:
    p = random_problem(6, 96, 80, 61, 3, dtype=dtype, ranks=(4, 9))
    layer = build_layer(p.experts, isa)
    whole = forward(layer, p)
    for t in range(p.x.shape[0]):
        assert torch.equal(forward(layer, p, slice(t, t + 1))[0], whole[t])
    order = torch.randperm(p.x.shape[0], generator=torch.Generator().manual_seed(5))
    assert torch.equal(forward(layer, p, order), whole[order])


@pytest.mark.parametrize("isa", instruction_sets())
def test_a_tokens_bits_do_not_depend_on_other_tokens_adapters(isa: str) -> None:
    p = random_problem(4, 64, 48, 20, 2, ranks=(4, 16))
    layer = build_layer(p.experts, isa)
    mixed, token_slots = forward(layer, p), present(p.token_slots)
    for slot in (-1, 0, 1):
        alone = torch.full_like(token_slots, slot)
        same = layer.forward(p.x, p.ids, p.weights, slots=p.slots, token_slots=alone)
        assert torch.equal(same[token_slots == slot], mixed[token_slots == slot])
    assert torch.equal(layer.forward(p.x, p.ids, p.weights)[token_slots == -1], mixed[token_slots == -1])


@pytest.mark.parametrize("isa", instruction_sets())
def test_results_do_not_depend_on_the_number_of_threads(isa: str) -> None:
    p = random_problem(5, 160, 96, 150, 3, dtype=torch.bfloat16, ranks=(8,))
    outputs, gradients = [], []
    for num_threads in (1, 2, 5):
        layer = build_layer(p.experts, isa, num_threads)
        outputs.append(forward(layer, p))
        g = layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora)
        gradients.append([g.x, g.weights, *tensors_of(g.slots[0])])
    for out, grads in zip(outputs[1:], gradients[1:], strict=True):
        assert torch.equal(out, outputs[0])
        assert all(torch.equal(a, b) for a, b in zip(grads, gradients[0], strict=True))


@pytest.mark.parametrize("isa", instruction_sets())
def test_bfloat16_and_float32_input_agree_on_the_same_numbers(isa: str) -> None:
    p = random_problem(3, 70, 40, 9, 2, dtype=torch.bfloat16)
    layer = build_layer(p.experts, isa)
    exact = layer.forward(p.x.float(), p.ids, p.weights)
    # The result is rounded to bfloat16, and so is h where the instruction set multiplies bfloat16: 2^-9 each at most.
    assert (layer.forward(p.x, p.ids, p.weights).float() - exact).norm() <= 2.0**-8 * exact.norm()


def test_strided_and_misaligned_tensors_are_read_in_place() -> None:
    p = random_problem(4, 33, 17, 12, 2, ranks=(5,))
    layer = build_layer(p.experts)
    wanted = forward(layer, p)

    def awkward(tensor: Tensor) -> Tensor:
        padded = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan")).to(tensor.dtype)
        padded[..., 1:-2] = tensor
        return padded[..., 1:-2]

    slots = [p.adapters[0].with_tensors([awkward(t) for t in tensors_of(p.slots[0])])]
    out = awkward(torch.zeros_like(p.x))
    ids = torch.nn.functional.pad(p.ids, (1, 2), value=99)[:, 1:-2]
    got = layer.forward(awkward(p.x), ids, awkward(p.weights), slots=slots, token_slots=p.token_slots, out=out)
    assert got is out and torch.equal(got, wanted)


def test_gradients_are_added_to_given_tensors() -> None:
    p = random_problem(3, 24, 16, 6, 2, ranks=(4,))
    layer = build_layer(p.experts)
    once = layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora).slots[0]
    into = p.adapters[0].zeros()
    for _ in range(2):
        layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora, into=[into])
    for twice, single in zip(tensors_of(into), tensors_of(once), strict=True):
        # 9.2e-8 of the largest was measured, 7.7e-8 with AMX
        torch.testing.assert_close(twice, 2 * single, rtol=0, atol=2 * 3.5e-7 * single.abs().max().item())


def test_an_adapter_may_cover_some_projections_only() -> None:
    p = random_problem(3, 20, 18, 7, 2, ranks=(4,))
    slot = LoraSlot(down_a=p.adapters[0].down_a, down_b=p.adapters[0].down_b, scaling=2.0)
    got = build_layer(p.experts).forward(p.x, p.ids, p.weights, slots=[slot], token_slots=p.token_slots)
    wanted = moe.routed_experts(p.experts, p.x, p.ids, p.weights, slots=as_reference([slot]), token_slots=p.token_slots)
    assert_close(got, wanted, "down only")


# bfloat16 activations of integer weights are quantized to int8 for a whole round at once.
LARGE: list[tuple[torch.dtype, str | None]]
LARGE = [(torch.float32, None), (torch.bfloat16, "int8"), (torch.bfloat16, "int4")]
LARGE_BATCHES = pytest.mark.parametrize(("dtype", "expert_format"), choose(few=LARGE[:2], usual=LARGE, every=LARGE))


@pytest.mark.slow
@LARGE_BATCHES
def test_batches_larger_than_the_scratch_give_the_same_bits(dtype: torch.dtype, expert_format: str | None) -> None:
    # Scratch holds 512 MiB of pairs of 13 KB: this call needs several rounds, its parts one each.
    p = random_problem(2, 1024, 16, 12_000, 4, dtype=dtype, ranks=(2,))
    layer = build_layer(p.experts, expert_format=expert_format)
    whole = forward(layer, p)
    parts = [forward(layer, p, slice(first, first + 4000)) for first in range(0, 12_000, 4000)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.slow
@LARGE_BATCHES
def test_gradients_of_batches_larger_than_the_scratch_are_those_of_the_parts(
    dtype: torch.dtype, expert_format: str | None
) -> None:
    p = random_problem(2, 1024, 16, 12_000, 4, dtype=dtype, ranks=(2,))
    layer = build_layer(p.experts, expert_format=expert_format)

    def gradients(rows: slice, retain: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        options: Lora = {"slots": p.slots, "token_slots": present(p.token_slots)[rows]}
        arguments = (p.x[rows], p.ids[rows], p.weights[rows])
        retained = layer.forward_retaining(*arguments, **options)[1] if retain else None
        g = layer.backward(p.grad_out[rows], *arguments, **options, retained=retained)
        return g.x, g.weights, [t.clone() for t in tensors_of(g.slots[0])]

    x, weights, adapter = gradients(slice(None), False)
    kept = gradients(slice(None), True)
    assert torch.equal(kept[0], x) and torch.equal(kept[1], weights)
    assert all(torch.equal(a, b) for a, b in zip(kept[2], adapter, strict=True))
    parts = [gradients(slice(first, first + 4000), False) for first in range(0, 12_000, 4000)]
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1] for part in parts]), weights)
    for i, whole in enumerate(adapter):  # sums over tokens in another order
        torch.testing.assert_close(
            sum(part[2][i] for part in parts),
            whole,
            rtol=0,
            atol=2e-5 * whole.abs().max().item(),  # 5.2e-6 measured
        )


def replaced(**changes: Any) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        arguments.update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            replaced(ids=torch.tensor([[4, 0]] * 5).int()),
            InvalidValueError,
            r"ids\[0, 0\] is 4; allowed: 0 to 3, or -1",
        ),
        (replaced(ids=torch.tensor([[-2, 0]] * 5).int()), InvalidValueError, r"is -2"),
        (replaced(ids=torch.zeros(5, 2)), InvalidValueError, r"ids has dtype float32; allowed: int32 or int64"),
        (replaced(ids=torch.zeros(4, 2).int()), InvalidValueError, r"ids has shape \[4, 2\]; expected \[5, any\]"),
        (replaced(weights=torch.zeros(5, 2).bfloat16()), InvalidValueError, r"weights has dtype bfloat16"),
        (replaced(weights=torch.full((5, 2), float("inf"))), NumericsError, r"weights\[0, 0\] is NaN or Inf"),
        (replaced(x=torch.zeros(5, 23)), InvalidValueError, r"x has shape \[5, 23\]; expected \[any, 24\]"),
        (replaced(x=torch.zeros(5, 24).half()), InvalidValueError, r"x has dtype .*; allowed: float32 or bfloat16"),
        (replaced(x=torch.zeros(24, 5).t()), InvalidValueError, r"x is not contiguous in its last dimension"),
        (replaced(x=[[0.0]]), InvalidValueError, r"x is a list, expected a torch.Tensor"),
        (replaced(x=torch.zeros(5, 24).index_fill(1, torch.tensor([7]), float("nan"))), NumericsError, r"x\[0, 7\]"),
        (
            replaced(token_slots=torch.ones(5).int()),
            InvalidValueError,
            r"token_slots\[0\] is 1; allowed: -1 for the base",
        ),
        (replaced(token_slots=torch.zeros(5).long()), InvalidValueError, r"token_slots has dtype int64"),
        (replaced(slots=[LoraSlot(gate_a=torch.zeros(4, 2, 24))]), InvalidValueError, r"slots\[0\].gate_b is missing"),
        (
            replaced(slots=[LoraSlot(gate_a=torch.zeros(4, 2, 24), gate_b=torch.zeros(4, 16, 3))]),
            InvalidValueError,
            r"slots\[0\].gate_b has shape \[4, 16, 3\]; expected \[4, 16, 2\]",
        ),
        (replaced(out=torch.zeros(5, 24).bfloat16()), InvalidValueError, r"out has dtype bfloat16; allowed: float32"),
        (
            replaced(out=torch.zeros(1, 24).expand(5, 24)),
            InvalidValueError,
            r"out is written, but elements of it lie in the same memory: shape \[5, 24\], strides \[0, 1\]",
        ),
        (
            replaced(out=torch.zeros(100).as_strided((5, 24), (10, 1))),
            InvalidValueError,
            r"out is written, but elements of it lie in the same memory: shape \[5, 24\], strides \[10, 1\]",
        ),
    ],
)
def test_bad_input_is_named(change: Change, error: type[Exception], message: str) -> None:
    p = random_problem(4, 24, 16, 5, 2)
    arguments: dict[str, Any] = {"x": p.x, "ids": p.ids, "weights": p.weights}
    change(arguments)
    with pytest.raises(error, match=message):
        build_layer(p.experts).forward(**arguments)


def test_a_result_in_the_memory_of_an_input_is_refused() -> None:
    p = random_problem(4, 24, 16, 5, 2, ranks=(3,))
    layer = build_layer(p.experts)
    room = torch.zeros(2000)
    x, weights = room[:120].view(5, 24), room[200:210].view(5, 2)
    gate_a = room[300 : 300 + 4 * 3 * 24].view(4, 3, 24)
    slots = [replace(p.adapters[0], gate_a=gate_a)]
    for first, name in ((0, "x"), (119, "x"), (190, "weights"), (300 + 4 * 3 * 24 - 1, r"slots\[0\].gate_a")):
        with pytest.raises(InvalidValueError, match=f"^out is written, but shares memory with {name}$"):
            layer.forward(
                x, p.ids, weights, slots=slots, token_slots=p.token_slots, out=room[first : first + 120].view(5, 24)
            )
    with pytest.raises(InvalidValueError, match=r"^out is written, but shares memory with ids$"):
        layer.forward(p.x, room[:10].view(torch.int32).view(5, 2), p.weights, out=room[:120].view(5, 24))


def test_a_result_beside_an_input_in_one_matrix_is_allowed() -> None:
    p = random_problem(4, 24, 16, 5, 2, ranks=(3,))
    layer = build_layer(p.experts)
    both = torch.cat([p.x, torch.zeros_like(p.x)], dim=1)
    layer.forward(both[:, :24], p.ids, p.weights, out=both[:, 24:])
    assert torch.equal(both, torch.cat([p.x, layer.forward(p.x, p.ids, p.weights)], dim=1))
    interleaved = torch.zeros(10, 24)
    interleaved[::2] = p.x
    layer.forward(interleaved[::2], p.ids, p.weights, out=interleaved[1::2])
    assert torch.equal(interleaved[1::2], both[:, 24:]) and torch.equal(interleaved[::2], p.x)


def test_gradients_that_share_memory_are_refused() -> None:
    p = random_problem(4, 24, 16, 5, 2, ranks=(3,))
    layer = build_layer(p.experts)

    def backward(into: LoraSlot) -> LoraSlot:
        return present(layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora, into=[into]).slots[0])

    wanted = backward(p.adapters[0].zeros())
    zeros = p.adapters[0].zeros()
    with pytest.raises(
        InvalidValueError, match=r"^slots\[0\].up_a is written, but elements of it lie in the same memory"
    ):
        backward(replace(zeros, up_a=torch.zeros(1, 3, 24).expand(4, 3, 24)))
    message = r"^gradient of slots\[0\].up_a is written, but shares memory with gradient of slots\[0\].gate_a$"
    with pytest.raises(InvalidValueError, match=message):
        backward(replace(zeros, up_a=zeros.gate_a))
    with pytest.raises(InvalidValueError, match=r"shares memory with slots\[0\].gate_a$"):
        backward(replace(zeros, gate_a=p.adapters[0].gate_a))
    halves = torch.zeros(4, 32, 3)  # gate and up of one fused tensor
    got = backward(replace(zeros, gate_b=halves[:, :16], up_b=halves[:, 16:]))
    assert all(map(torch.equal, tensors_of(got), tensors_of(wanted)))


def test_inputs_may_be_expanded() -> None:
    p = random_problem(4, 24, 16, 5, 2)
    layer = build_layer(p.experts)
    same = p.x[:1].expand(5, 24)
    assert torch.equal(layer.forward(same, p.ids, p.weights), layer.forward(same.clone(), p.ids, p.weights))


def test_nan_in_the_outputs_gradient_is_named() -> None:
    p = random_problem(2, 24, 16, 3, 2)
    p.grad_out[2, 5] = float("inf")
    with pytest.raises(NumericsError, match=r"grad_out\[2, 5\] is NaN or Inf"):
        build_layer(p.experts).backward(p.grad_out, p.x, p.ids, p.weights)


def test_the_first_nan_of_a_large_call_is_named_before_anything_is_written() -> None:
    p = random_problem(4, 512, 128, 300, 2, ranks=(4,))
    layer = build_layer(p.experts, num_threads=3)

    def spoiled(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy[299, 3], copy[17, 5], copy[17, 400] = float("nan"), float("inf"), float("nan")
        return copy

    p.ids[17] = -1  # also of a token that no expert reads
    out = torch.full_like(p.x, 7.0)
    with pytest.raises(NumericsError, match=r"^x\[17, 5\] is NaN or Inf"):
        layer.forward(spoiled(p.x), p.ids, p.weights, **p.lora, out=out)
    with pytest.raises(NumericsError, match=r"^x\[17, 5\] is NaN or Inf"):
        layer.forward_retaining(spoiled(p.x), p.ids, p.weights, **p.lora, out=out)
    assert torch.equal(out, torch.full_like(p.x, 7.0))

    _, retained = layer.forward_retaining(p.x, p.ids, p.weights, **p.lora)
    into = [slot.zeros() for slot in p.adapters]
    for kept in (None, retained):
        for grad_out, x, name in ((spoiled(p.grad_out), p.x, "grad_out"), (p.grad_out, spoiled(p.x), "x")):
            with pytest.raises(NumericsError, match=rf"^{name}\[17, 5\] is NaN or Inf"):
                layer.backward(grad_out, x, p.ids, p.weights, **p.lora, into=into, retained=kept)
    assert not any(tensor.any() for slot in into for tensor in tensors_of(slot))
    layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora, into=into, retained=retained)
    assert any(tensor.any() for slot in into for tensor in tensors_of(slot))
