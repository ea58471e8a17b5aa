"""Layers of every format against the float64 reference on the weights that the checkpoint stands for.

float32 activations are multiplied exactly, bfloat16 ones quantized to int8 by groups where the weights are integers;
each of the three products then adds the rounding of its input, about 0.5 % of its norm for normal values. (AMX gives
them 15 bits where int8 weights have a scale for each row, and adds less.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import moe
from reference.cases import examples
from reference.drawn import drawn
from reference.expert_problems import Problem, random_problem, tensors_of
from reference.instruction_sets import instruction_sets
from reference.moe import ReferenceExperts
from reference.quantized import DISTINCT, SCHEMES, write_checkpoint
from torch import Tensor

from kt_runtime.errors import InvalidValueError, NumericsError
from kt_runtime.experts import ExpertLayer, ExpertShape, ExpertStore, LoraSlot, routed_experts

# Of the result's norm; three times as much for gradients.
FLOAT32 = 3e-6  # 8.4e-7 measured, 2.7e-6 of gradients
INTEGER_ACTIVATIONS = 0.02  # of the layer's output, for large layers; 0.0147 measured
SMALL_LAYER = 2.5  # a few rows vary about it; 0.0242 measured, 0.03 of gradients
BF16_ACTIVATIONS = 2.0**-7  # factors and results are rounded; 2.6e-3 measured, 3.9e-3 of gradients
OpenLayer = Callable[..., tuple[ExpertLayer, ReferenceExperts]]
SETTINGS = settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def open_layer(tmp_path_factory: pytest.TempPathFactory) -> OpenLayer:
    """open_layer(experts, scheme, isa, ...) -> the layer, and the experts that its checkpoint stands for.

    Writing a checkpoint takes longer than opening it, and tests open one several times: the last one is kept.
    """
    directory = tmp_path_factory.mktemp("quantized")
    written: dict[str, tuple[ReferenceExperts, ReferenceExperts]] = {}  # the drawn experts and the checkpoint's values

    def write(experts: ReferenceExperts, scheme: str) -> ReferenceExperts:
        drawn = written[scheme][0] if scheme in written else None
        if drawn is None or not (drawn is experts or all(map(torch.equal, matrices(experts), matrices(drawn)))):
            (directory / "model.safetensors").unlink(missing_ok=True)  # a layer may still have it mapped
            written.clear()
            written[scheme] = experts, write_checkpoint(directory, {"m": experts}, scheme)["m"]
        return written[scheme][1]

    def build(
        experts: ReferenceExperts, scheme: str, isa: str | None = None, num_threads: int = 2, **options: Any
    ) -> tuple[ExpertLayer, ReferenceExperts]:
        values = write(experts, scheme)
        num_experts, inner, hidden = experts.gate.shape
        shape = ExpertShape(num_experts, hidden, inner)
        store = ExpertStore.load(directory, {0: "m"}, shape, isa=isa, num_threads=num_threads, **options)
        return store.layers[0], values

    return build


@functools.cache
def drawn_problem(num_experts: int, hidden: int, inner: int, tokens: int) -> Problem:
    """Drawn once for all schemes and instruction sets."""
    return random_problem(num_experts, hidden, inner, tokens, 2, dtype=torch.bfloat16)


def matrices(experts: ReferenceExperts) -> tuple[Tensor, Tensor, Tensor]:
    return experts.gate, experts.up, experts.down


def lora_of(slot: LoraSlot, leaves: list[Tensor]) -> list[moe.Lora]:
    return [(leaves, slot.scaling)]


def tolerance_of(dtype: torch.dtype, scheme: str) -> float:
    if dtype == torch.float32:
        return FLOAT32
    integers = any(part in SCHEMES[scheme].format for part in ("int", "fp4"))
    return SMALL_LAYER * INTEGER_ACTIVATIONS if integers else BF16_ACTIVATIONS


def relative(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    scheme = draw(st.sampled_from(sorted(SCHEMES)))
    sizes = st.sampled_from([128, 256, 384])  # what GPTQ and AWQ can pack, with any group
    return {
        "scheme": scheme,
        "num_experts": draw(st.integers(1, 4)),
        "hidden": draw(sizes),
        "inner": draw(sizes),
        "tokens": draw(st.sampled_from([1, 2, 5, 13, 40])),
        "top_k": draw(st.integers(1, 3)),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "num_nodes": draw(st.sampled_from([1, 2, 3])),
        "seed": draw(st.integers(0, 1000)),
    }


@SETTINGS
@given(case=cases())
def test_forward_and_backward_are_the_reference_on_the_checkpoints_weights(
    case: dict[str, Any], open_layer: OpenLayer
) -> None:
    """On every instruction set: each has the same checkpoint and the same reference."""
    scheme, num_nodes = case["scheme"], case["num_nodes"]
    p = random_problem(**{k: v for k, v in case.items() if k not in ("scheme", "num_nodes")}, ranks=(4,))
    opened = {isa: open_layer(p.experts, scheme, isa, num_nodes=num_nodes) for isa in instruction_sets()}
    _, values = next(iter(opened.values()))
    slot = p.adapters[0]
    leaves = [t.double().requires_grad_() for t in tensors_of(slot)]
    x, weights = p.x.double().requires_grad_(), p.weights.double().requires_grad_()
    wanted = moe.routed_experts(values, x, p.ids, weights, slots=lora_of(slot, leaves), token_slots=p.token_slots)
    grads = torch.autograd.grad(wanted, [x, weights, *leaves], p.grad_out.double(), allow_unused=True)
    limit = tolerance_of(case["dtype"], scheme)
    for isa, (layer, _) in opened.items():
        assert layer.format == SCHEMES[scheme].format
        assert_is_the_reference(isa, layer, p, wanted.detach(), grads, limit)


def assert_is_the_reference(
    isa: str, layer: ExpertLayer, p: Problem, wanted: Tensor, wanted_grads: tuple[Tensor | None, ...], limit: float
) -> None:
    out, retained = layer.forward_retaining(p.x, p.ids, p.weights, **p.lora)
    if wanted.norm() > 0:
        assert relative(out, wanted) <= limit, isa
    calls = [layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora, retained=kept) for kept in (retained, None)]
    first, second = ([g.x, g.weights, *tensors_of(g.slots[0])] for g in calls)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), f"{isa}: retained, recomputed differ"
    for i, (got, grad) in enumerate(zip(first, wanted_grads, strict=True)):
        if grad is None or grad.norm() == 0:
            assert got.abs().max() == 0, isa
            continue
        # The gradient of a routing weight is an inner product that may cancel: it is as exact as its factors are large.
        scale = p.grad_out.norm().item() * wanted.norm().item() if i == 1 else 0.0
        assert (got.double() - grad).norm() <= 3 * limit * max(scale, grad.norm().item()), isa


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("scheme", DISTINCT)
def test_a_tokens_bits_do_not_depend_on_batch_threads_or_memory_nodes(
    isa: str, scheme: str, open_layer: OpenLayer
) -> None:
    p = drawn_problem(3, 256, 384, 90)
    layer, _ = open_layer(p.experts, scheme, isa, num_threads=1)
    whole, down = layer.forward(p.x, p.ids, p.weights), layer.unpacked(1)[2]
    for t in range(0, 90, 7):
        rows = slice(t, t + 1)
        assert torch.equal(layer.forward(p.x[rows], p.ids[rows], p.weights[rows])[0], whole[t])
    for options in ({"num_threads": 2}, {"num_threads": 5}, {"num_threads": 2, "num_nodes": 4}):
        other, _ = open_layer(p.experts, scheme, isa, **options)
        assert torch.equal(other.forward(p.x, p.ids, p.weights), whole)
        assert other.unpacked(1)[2].equal(down)


@pytest.mark.slow
@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("scheme", DISTINCT)
def test_few_tokens_of_many_experts_have_the_same_bits_on_any_threads_and_nodes(
    isa: str, scheme: str, open_layer: OpenLayer
) -> None:
    p = drawn_problem(8, 384, 384, 16)
    assert p.ids[p.ids >= 0].bincount().max() <= 16  # few rows each: cut into runs as long as the threads allow
    layer, _ = open_layer(p.experts, scheme, isa, num_threads=1)
    whole = layer.forward(p.x, p.ids, p.weights)
    for options in ({"num_threads": 2}, {"num_threads": 5}, {"num_threads": 2, "num_nodes": 3}):
        other, _ = open_layer(p.experts, scheme, isa, **options)
        assert torch.equal(other.forward(p.x, p.ids, p.weights), whole)


@pytest.mark.parametrize("scheme", ["int8", "int8_g128", "int4_g32", "gptq_int4_g128_zp", "awq_g128", "nvfp4"])
def test_integer_products_are_the_same_on_every_vector_instruction_set(scheme: str, open_layer: OpenLayer) -> None:
    """Sums of integers are exact, and the vector kernels scale them with the same fused operations in the same order.

    The portable kernels round the product and the sum apart, so they agree only to float32's precision. AMX gives the
    activations more digits where the weights have one scale a row.
    """
    p = random_problem(3, 256, 128, 20, 2, dtype=torch.bfloat16)
    outputs = {isa: open_layer(p.experts, scheme, isa)[0].forward(p.x, p.ids, p.weights) for isa in instruction_sets()}
    reference = outputs.pop("portable")
    if scheme == "int8":
        outputs.pop("amx", None)
    for isa, out in outputs.items():
        # None differs here. One of the 5,120 that rounds the other way is 5e-5: room for some twenty.
        assert relative(out, reference.double()) < 2.0**-12, isa
    assert len({tuple(out.flatten().tolist()) for out in outputs.values()}) <= 1


@pytest.mark.parametrize("isa", instruction_sets())
def test_int8_activations_cost_what_the_documents_say(isa: str, open_layer: OpenLayer) -> None:
    p = random_problem(2, 1024, 512, 16, 2, dtype=torch.bfloat16)
    layer, values = open_layer(p.experts, "int8", isa)
    wanted = moe.routed_experts(values, p.x, p.ids, p.weights)
    exact = layer.forward(p.x.float(), p.ids, p.weights)
    quantized = layer.forward(p.x, p.ids, p.weights)
    assert relative(exact, wanted) < 2e-6  # 5.2e-7 measured
    if isa == "amx":  # 15 bits of activations: the rest is rounding of the result to bf16
        assert relative(quantized, wanted) < 2.0**-8
    else:
        assert 0.002 < relative(quantized, wanted) < INTEGER_ACTIVATIONS


def test_training_on_int4_lowers_the_loss_as_autograd_on_the_same_weights_does(open_layer: OpenLayer) -> None:
    p = random_problem(2, 128, 128, 12, 2)
    layer, values = open_layer(p.experts, "int4_g32")
    target = drawn(12, 128, seed=3)
    generator = torch.Generator().manual_seed(4)
    leaves = [
        (0.1 * torch.randn(2, *shape, generator=generator)).requires_grad_()
        for shape in ((4, 128), (128, 4), (4, 128), (128, 4), (4, 128), (128, 4))
    ]
    ours = LoraSlot(scaling=1.0).with_tensors(leaves)
    theirs = [t.detach().double().requires_grad_() for t in leaves]
    slots = torch.zeros(12, dtype=torch.int32)
    losses = []
    for _ in range(5):
        mine = (routed_experts(layer, p.x, p.ids, p.weights, ours) - target).pow(2).mean()
        wanted = moe.routed_experts(values, p.x, p.ids, p.weights, slots=[(theirs, 1.0)], token_slots=slots)
        other = (wanted - target.double()).pow(2).mean()
        losses.append((mine.item(), other.item()))
        for loss, tensors in ((mine, leaves), (other, theirs)):
            for tensor, grad in zip(tensors, torch.autograd.grad(loss, tensors), strict=True):
                tensor.data -= 0.5 * grad
    assert losses[-1][0] < losses[0][0]
    for native, exact in losses:
        assert native == pytest.approx(exact, rel=8e-7)  # 1e-7 measured


def test_nan_among_activations_is_refused_in_every_format(open_layer: OpenLayer) -> None:
    p = random_problem(2, 128, 128, 3, 2, dtype=torch.bfloat16)
    for scheme in DISTINCT:
        layer, _ = open_layer(p.experts, scheme)
        x = p.x.clone()
        x[1, 17] = float("nan")
        with pytest.raises(NumericsError, match=r"x\[1, 17\] is NaN or Inf"):
            layer.forward(x, p.ids, p.weights)


def test_retained_activations_of_another_call_are_refused(open_layer: OpenLayer) -> None:
    p = random_problem(2, 128, 128, 6, 2)
    layer, _ = open_layer(p.experts, "int8")
    _, retained = layer.forward_retaining(p.x[:4], p.ids[:4], p.weights[:4])
    assert retained.bytes >= int((p.ids[:4] >= 0).sum()) * 8 * 128
    with pytest.raises(InvalidValueError, match=r"x.shape\[0\] was 4 there and is 6 here"):
        layer.backward(p.grad_out, p.x, p.ids, p.weights, retained=retained)
