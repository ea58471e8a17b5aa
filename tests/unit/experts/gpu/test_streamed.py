"""Experts that stream through the ring, on CPU tensors: against the float64 reference and the expert store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import moe
from reference.expert_problems import Problem, assert_close, build_layer, present, random_problem, tensors_of
from torch import Tensor

from kt_runtime.errors import InvalidValueError, NumericsError
from kt_runtime.experts import ExpertGradients, ExpertLayer, LoraSlot
from kt_runtime.experts.gpu import routed_mlp, streamed
from kt_runtime.experts.gpu.call import ExpertCall
from kt_runtime.experts.gpu.dropout import dropout_mask
from kt_runtime.experts.gpu.ring import ExpertRing

HOST = torch.device("cpu")
FLOAT32_AS_STORE = 3e-6  # of a result's norm; 3.4e-7 is measured, for gradients
FLOAT32_OUTPUT = 3e-7  # of the output alone; 2.4e-8 to 3.9e-8 is measured
BF16_AS_STORE = 2.7e-2  # 2.7e-3 is measured: each pair's output is rounded to bfloat16 before the sum


@pytest.fixture
def ring_of() -> Iterator[Callable[[ExpertLayer, int], ExpertRing]]:
    rings: list[ExpertRing] = []

    def make(layer: ExpertLayer, chunk_experts: int) -> ExpertRing:
        rings.append(ExpertRing(HOST, layer.shape, chunk_experts))
        return rings[-1]

    yield make
    for ring in rings:
        ring.close()


RingOf = Callable[[ExpertLayer, int], ExpertRing]


def call_of(p: Problem) -> ExpertCall:
    return ExpertCall(p.x, p.ids, p.weights, p.slots, p.token_slots)


def with_dropout(p: Problem) -> Problem:
    p.slots = [s and replace(s, dropout=0.3, seed=seed) for s, seed in zip(p.slots, (7, 2**64 - 1, 0), strict=False)]
    return p


def forward(ring: ExpertRing, layer: ExpertLayer, p: Problem) -> Tensor:
    return streamed.forward(ring, layer, call_of(p), None, retain=False)[0]


def tensors(gradients: ExpertGradients) -> list[Tensor]:
    return [gradients.x, gradients.weights, *(t for slot in gradients.slots if slot for t in tensors_of(slot))]


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


PROBLEMS = [
    {"tokens": 9, "top_k": 2, "num_experts": 3, "hidden": 33, "inner": 17},
    {"tokens": 70, "top_k": 3, "num_experts": 5, "hidden": 160, "inner": 96, "ranks": (4, 0, 6)},
    {"tokens": 40, "top_k": 4, "num_experts": 6, "hidden": 64, "inner": 32, "ranks": (8,), "id_dtype": torch.int64},
]


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_forward_and_backward_are_the_float64_reference(problem: dict[str, Any], chunk: int, ring_of: RingOf) -> None:
    p = random_problem(**problem)
    x, weights = p.x.double().requires_grad_(), p.weights.double().requires_grad_()
    leaves = [[t.double().requires_grad_() for t in tensors_of(s)] if s else [] for s in p.slots]
    slots = [(own, s.scaling) if s else None for own, s in zip(leaves, p.slots, strict=True)]
    out = moe.routed_experts(p.experts, x, p.ids, weights, slots=slots, token_slots=p.token_slots)
    flat = [x, weights, *(t for own in leaves for t in own)]
    wanted = torch.autograd.grad(out, flat, p.grad_out.double())
    layer = build_layer(p.experts)
    ring = ring_of(layer, chunk)
    assert_close(forward(ring, layer, p), out.detach(), "forward")
    found = streamed.backward(ring, layer, p.grad_out, call_of(p), None, None)
    assert [s is None for s in found.slots] == [s is None for s in p.slots]
    for g, w in zip(tensors(found), wanted, strict=True):
        assert_close(g, w, "gradient")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32_AS_STORE), (torch.bfloat16, BF16_AS_STORE)])
def test_results_are_the_stores_with_dropout_and_several_adapters(
    dtype: torch.dtype, tolerance: float, ring_of: RingOf
) -> None:
    p = with_dropout(random_problem(5, 160, 96, 70, 3, dtype=dtype, ranks=(4, 0, 6)))
    layer = build_layer(p.experts)
    ring = ring_of(layer, 2)
    assert relative(forward(ring, layer, p), layer.forward(p.x, p.ids, p.weights, **p.lora)) <= tolerance
    found = streamed.backward(ring, layer, p.grad_out, call_of(p), None, None)
    wanted = layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora)
    assert found.x.dtype == dtype
    for g, w in zip(tensors(found), tensors(wanted), strict=True):
        assert relative(g, w) <= tolerance


@pytest.mark.parametrize("expert_format", ["int8", "int4"])
def test_quantized_weights_stream_as_bfloat16(expert_format: str, ring_of: RingOf) -> None:
    p = random_problem(4, 128, 64, 50, 2)
    layer = build_layer(p.experts, expert_format=expert_format)
    found, wanted = forward(ring_of(layer, 3), layer, p), layer.forward(p.x, p.ids, p.weights)
    assert relative(found, wanted) <= 2.7e-2  # 2.7e-3 is measured: weights are rounded to bfloat16


def test_retained_activations_give_the_bits_of_those_computed_again(ring_of: RingOf) -> None:
    p = with_dropout(random_problem(5, 48, 32, 40, 3, ranks=(4, 6)))
    layer = build_layer(p.experts)
    ring, other = ring_of(layer, 2), ring_of(layer, 3)
    _, kept = streamed.forward(ring, layer, call_of(p), None, retain=True)
    assert kept is not None and kept.bytes >= int((p.ids >= 0).sum()) * 2 * 32 * 4
    again = tensors(streamed.backward(ring, layer, p.grad_out, call_of(p), None, None))
    for given, through in ((kept, ring), (kept, other)):  # of another ring they are not used
        found = streamed.backward(through, layer, p.grad_out, call_of(p), None, given)
        assert all(torch.equal(f, a) for f, a in zip(tensors(found), again, strict=True))


def test_the_bits_do_not_depend_on_chunks_or_on_the_other_experts_tokens(ring_of: RingOf) -> None:
    p = random_problem(6, 64, 32, 40, 3, ranks=(4,))
    layer = build_layer(p.experts)
    results = [forward(ring_of(layer, chunk), layer, p) for chunk in (1, 4, 6)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_experts_without_tokens_are_not_loaded(ring_of: RingOf, monkeypatch: pytest.MonkeyPatch) -> None:
    p = random_problem(8, 32, 16, 12, 2)
    p.ids = torch.where(p.ids % 3 == 0, p.ids, torch.tensor(-1, dtype=torch.int32))
    layer = build_layer(p.experts)
    seen: list[int] = []
    unpack = layer.unpack_range

    def counted(first: int, count: int, w13: Tensor, w2: Tensor) -> None:
        seen.extend(range(first, first + count))
        unpack(first, count, w13, w2)

    monkeypatch.setattr(layer, "unpack_range", counted)
    found = forward(ring_of(layer, 2), layer, p)
    assert sorted(seen) == sorted(set(p.ids[p.ids >= 0].tolist()))
    assert relative(found, layer.forward(p.x, p.ids, p.weights)) <= FLOAT32_OUTPUT


def test_a_call_without_tokens_or_without_experts_is_zeros(ring_of: RingOf) -> None:
    p = random_problem(4, 32, 16, 6, 2, ranks=(2,))
    layer = build_layer(p.experts)
    ring = ring_of(layer, 2)
    nothing = ExpertCall(p.x, torch.full_like(p.ids, -1), p.weights, p.slots, p.token_slots)
    assert not streamed.forward(ring, layer, nothing, None, retain=False)[0].any()
    assert not any(t.any() for t in tensors(streamed.backward(ring, layer, p.grad_out, nothing, None, None)))
    empty = ExpertCall(p.x[:0], p.ids[:0], p.weights[:0], [], None)
    assert streamed.forward(ring, layer, empty, None, retain=False)[0].shape == (0, 32)


def test_gradients_are_added_to_given_tensors_and_the_result_to_a_given_one(ring_of: RingOf) -> None:
    p = random_problem(4, 32, 16, 20, 2, ranks=(3,))
    layer = build_layer(p.experts)
    ring = ring_of(layer, 2)
    into = p.adapters[0].zeros()
    for _ in range(2):
        gradients = streamed.backward(ring, layer, p.grad_out, call_of(p), [into], None)
    assert gradients.slots[0] is into
    alone = streamed.backward(ring, layer, p.grad_out, call_of(p), None, None).slots[0]
    for twice, once in zip(tensors_of(into), tensors_of(alone), strict=True):
        assert torch.equal(twice, 2 * once)
    out = torch.full_like(p.x, float("nan"))
    assert streamed.forward(ring, layer, call_of(p), out, retain=False)[0] is out
    assert torch.equal(out, forward(ring, layer, p))


def test_an_adapter_may_cover_some_projections_and_its_nan_stays_with_its_tokens(ring_of: RingOf) -> None:
    p = random_problem(4, 32, 16, 20, 2, ranks=(3, 3))
    p.slots = [LoraSlot(up_a=p.adapters[0].up_a, up_b=p.adapters[0].up_b), p.adapters[1]]
    layer = build_layer(p.experts)
    ring = ring_of(layer, 4)
    wanted = layer.forward(p.x, p.ids, p.weights, **p.lora)
    assert relative(forward(ring, layer, p), wanted) <= FLOAT32_OUTPUT
    p.slots[1] = replace(p.adapters[1], down_b=torch.full_like(present(p.adapters[1].down_b), float("nan")))
    others = present(p.token_slots) != 1
    assert relative(forward(ring, layer, p)[others], wanted[others]) <= FLOAT32_OUTPUT


@pytest.mark.parametrize("seed", [0, 7, 2**63, 2**64 - 1])
@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_drops_what_the_store_drops(seed: int, dropout: float, ring_of: RingOf) -> None:
    p = random_problem(3, 24, 16, 30, 2, ranks=(4,))
    p.slots = [replace(p.adapters[0], dropout=dropout, seed=seed)]
    layer = build_layer(p.experts)
    wanted = layer.forward(p.x, p.ids, p.weights, **p.lora)
    assert relative(forward(ring_of(layer, 2), layer, p), wanted) <= 1e-6  # 1.1e-7 is measured


def test_a_mask_keeps_the_mean() -> None:
    tokens = torch.arange(200)
    mask = dropout_mask(5, 0.25, tokens, torch.full_like(tokens, 3), 1, 512)
    share = (0.25 * 0.75 / mask.numel()) ** 0.5  # the standard deviation of the share that is dropped
    assert float((mask == 0).double().mean()) == pytest.approx(0.25, abs=3 * share)
    assert float(mask.mean()) == pytest.approx(1, abs=3 * share / 0.75)


CHANGES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ids": torch.tensor([[4, 0]] * 5).int()}, InvalidValueError, r"ids\[0, 0\] is 4; allowed: 0 to 3, or -1 for not"),
    ({"ids": torch.tensor([[0, 1]] * 4 + [[0, -2]]).int()}, InvalidValueError, r"ids\[4, 1\] is -2"),
    ({"ids": torch.zeros(5, 2)}, InvalidValueError, r"ids has dtype float32; allowed: int32 or int64"),
    ({"ids": torch.zeros(4, 2).int()}, InvalidValueError, r"ids has shape \[4, 2\]; expected \[5, any\]"),
    ({"weights": torch.zeros(5, 2).bfloat16()}, InvalidValueError, r"weights has dtype bfloat16; allowed: float32"),
    ({"weights": torch.full((5, 2), float("inf"))}, NumericsError, r"weights\[0, 0\] is NaN or Inf"),
    ({"x": torch.zeros(5, 23)}, InvalidValueError, r"x has shape \[5, 23\]; expected \[any, 24\]"),
    ({"x": torch.zeros(5, 24).half()}, InvalidValueError, r"x has dtype float16; allowed: float32 or bfloat16"),
    ({"x": torch.zeros(5, 24).index_fill(1, torch.tensor([7]), float("nan"))}, NumericsError, r"x\[0, 7\] is NaN"),
    ({"token_slots": torch.ones(5).int()}, InvalidValueError, r"token_slots\[0\] is 1; allowed: -1 for the base"),
    ({"token_slots": torch.zeros(5).long()}, InvalidValueError, r"token_slots has dtype int64; allowed: int32"),
    ({"slots": [LoraSlot(gate_a=torch.zeros(4, 2, 24))]}, InvalidValueError, r"slots\[0\].gate_b is missing"),
    ({"slots": [LoraSlot(dropout=1.0)]}, InvalidValueError, r"slots\[0\].dropout is 1, expected \[0, 1\)"),
    (
        {"slots": [LoraSlot(gate_a=torch.zeros(4, 2, 24), gate_b=torch.zeros(4, 16, 3))]},
        InvalidValueError,
        r"slots\[0\].gate_b has shape \[4, 16, 3\]; expected \[4, 16, 2\]",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), CHANGES)
def test_bad_input_is_named_as_the_store_names_it(
    change: dict[str, Any], error: type[Exception], message: str, ring_of: RingOf
) -> None:
    p = random_problem(4, 24, 16, 5, 2)
    arguments: dict[str, Any] = {"x": p.x, "ids": p.ids, "weights": p.weights, "slots": [], "token_slots": None}
    arguments |= change
    layer = build_layer(p.experts)
    ring = ring_of(layer, 2)
    out = torch.full_like(p.x, 7.0)
    with pytest.raises(error, match=message):
        streamed.forward(ring, layer, ExpertCall(**arguments), out, retain=False)
    assert (out == 7).all(), "nothing is written before a call is refused"
    assert forward(ring, layer, p).isfinite().all()


def test_a_nan_of_the_outputs_gradient_is_named(ring_of: RingOf) -> None:
    p = random_problem(4, 24, 16, 5, 2)
    layer = build_layer(p.experts)
    p.grad_out[3, 2] = float("nan")
    with pytest.raises(NumericsError, match=r"grad_out\[3, 2\] is NaN or Inf"):
        streamed.backward(ring_of(layer, 2), layer, p.grad_out, call_of(p), None, None)


class TestPlanted:
    """Faults in the arithmetic: each one is seen by the comparison with the store above."""

    def compare(self, ring_of: RingOf) -> bool:
        p = with_dropout(random_problem(5, 48, 32, 60, 3, ranks=(4, 6)))
        layer = build_layer(p.experts)
        ring = ring_of(layer, 2)
        found = [forward(ring, layer, p)]
        found += tensors(streamed.backward(ring, layer, p.grad_out, call_of(p), None, None))
        wanted = [layer.forward(p.x, p.ids, p.weights, **p.lora)]
        wanted += tensors(layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora))
        return all(relative(f, w) <= FLOAT32_AS_STORE for f, w in zip(found, wanted, strict=True))

    def test_nothing_planted(self, ring_of: RingOf) -> None:
        assert self.compare(ring_of)

    def test_swiglu_without_its_gate(self, ring_of: RingOf, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(routed_mlp, "silu", lambda gate: torch.sigmoid(gate))
        assert not self.compare(ring_of)

    def test_rows_of_one_expert_go_to_the_next(self, ring_of: RingOf, monkeypatch: pytest.MonkeyPatch) -> None:
        ends = streamed.checked_ends

        def shifted(*args: Any) -> list[int]:
            good = ends(*args)
            return [good[0] + 1, *good[1:]]

        monkeypatch.setattr(streamed, "checked_ends", shifted)
        assert not self.compare(ring_of)

    def test_pairs_are_not_sorted_stably_with_their_places(
        self, ring_of: RingOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sort = streamed.sorted_pairs
        monkeypatch.setattr(streamed, "sorted_pairs", lambda *a: replace(sort(*a), places=sort(*a).places.roll(1, 1)))
        assert not self.compare(ring_of)

    def test_dropout_of_another_projection(self, ring_of: RingOf, monkeypatch: pytest.MonkeyPatch) -> None:
        from kt_runtime.experts.gpu import adapters

        monkeypatch.setattr(adapters, "dropout_mask", lambda s, d, t, e, p, c: dropout_mask(s, d, t, e, (p + 1) % 3, c))
        assert not self.compare(ring_of)


def test_chunks_are_closed_when_a_product_fails(ring_of: RingOf, monkeypatch: pytest.MonkeyPatch) -> None:
    p = random_problem(6, 32, 16, 30, 2)
    layer = build_layer(p.experts)
    ring = ring_of(layer, 1)
    wanted = forward(ring, layer, p)
    with monkeypatch.context() as patch:
        patch.setattr(streamed, "expert_forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward(ring, layer, p)
    with closing(ring.chunks(layer, [0, 1, 2])) as chunks:
        next(chunks)  # left after the first chunk
    assert torch.equal(forward(ring, layer, p), wanted)
