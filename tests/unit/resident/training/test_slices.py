"""Gradients and training steps against plain Hugging Face autograd in float32."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kt_runtime.errors import NumericsError
from kt_runtime.experts import ExpertLayer
from kt_runtime.resident.training.call import Call
from kt_runtime.resident.training.losses import WeightedCrossEntropy
from kt_runtime.resident.training.slices import _Kept, training_call
from kt_runtime.resident.training.slices import _slice as surroundings
from kt_runtime.resident.twin.batches import split
from kt_runtime.wire.messages import CrossEntropy


def leaves(session: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone().requires_grad_() for name, value in session.parameters.items()}


def plain_gradients(lab: Any, session: Any, batch: Any) -> tuple[dict[str, torch.Tensor], float]:
    values = leaves(session)
    loss = lab.plain_loss(session, values, batch)
    loss.backward()
    return values, float(loss.detach())


def plain_steps(lab: Any, session: Any, batches: list[Any]) -> list[tuple[float, float]]:
    """(loss, norm of the gradient) of each step, from the session's parameters."""
    values, steps = leaves(session), []
    optimizer = torch.optim.AdamW(values.values(), lr=5e-3, weight_decay=0.01, foreach=False)
    for batch in batches:
        optimizer.zero_grad()
        loss = lab.plain_loss(session, values, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(values.values()), 5.0)
        optimizer.step()
        steps.append((float(loss.detach()), float(norm)))
    return steps


@pytest.fixture(scope="module")
def once_a_family() -> Callable[[Any, Callable[[], Any]], Any]:
    """`once_a_family(lab, compute)`: what a test computes with the plain model does not depend on how the twin attends
    or on microbatches."""
    computed: dict[tuple[str, str], Any] = {}  # by what is computed, and the checkpoint

    def result(lab: Any, compute: Callable[[], Any]) -> Any:
        key = (compute.__qualname__, lab.host.model)
        if key not in computed:
            computed[key] = compute()
        return computed[key]

    return result


@pytest.mark.parametrize("max_tokens", [32, 1000], ids=["three microbatches", "one microbatch"])
def test_every_gradient_equals_plain_autograd(lab: Any, batch: Any, once_a_family: Any, max_tokens: int) -> None:
    session = lab.session()
    result = lab.forward_backward(session, batch, max_tokens)
    values, expected = once_a_family(lab, lambda: plain_gradients(lab, session, batch))
    assert result.loss == pytest.approx(expected, rel=8e-7)  # 8.7e-8 measured
    groups = {module.group for module in session.modules}
    assert groups >= {"attention", "experts"}
    worst = 0.0
    for name, value in values.items():
        found, wanted = session.gradient[name], value.grad
        assert wanted is not None and wanted.norm() > 0, name
        error = float((found - wanted).norm() / wanted.norm())
        worst = max(worst, error)
        assert error <= 1.5e-5, name  # 1.7e-6 measured
    print(f"{lab.twin.family.name}: {len(values)} tensors, largest relative error {worst:.2e}")


@pytest.mark.slow
def test_ten_adamw_steps_give_the_same_losses(lab: Any, make_batch: Any, once_a_family: Any) -> None:
    session = lab.session(fill=False)
    batches = [make_batch(20, 11, 25, seed=step % 3) for step in range(10)]
    plain = once_a_family(lab, lambda: plain_steps(lab, session, batches))
    ours = []
    for batch, (_, expected_norm) in zip(batches, plain, strict=True):
        ours.append(lab.forward_backward(session, batch).loss)
        norm = lab.step(session, 5e-3, weight_decay=0.01, max_grad_norm=5.0)
        assert norm == pytest.approx(expected_norm, rel=5e-6)  # 5.2e-7 measured
    assert ours == pytest.approx([loss for loss, _ in plain], rel=9e-7)  # 9.2e-8 measured
    assert ours[-1] < ours[0]
    assert session.step == 10


def test_logprobs_are_the_model_s_whatever_the_microbatches(deepseek_lab: Any, batch: Any) -> None:
    session = deepseek_lab.session()
    together = deepseek_lab.forward(session, batch, max_tokens=1000)
    apart = deepseek_lab.forward(session, batch, max_tokens=1)
    expected = deepseek_lab.plain_loss(session, session.parameters, batch)
    assert torch.equal(together.logprobs, apart.logprobs)
    assert together.loss == pytest.approx(float(expected.detach()), rel=8e-7)  # 8.1e-8 measured
    assert not session.gradient


def test_the_model_base_computes_with_the_base_alone(deepseek_lab: Any, batch: Any) -> None:
    session = deepseek_lab.session()
    base = {name: torch.zeros_like(value) for name, value in session.parameters.items()}
    found = deepseek_lab.forward(session, batch, model="base")
    assert found.loss == pytest.approx(float(deepseek_lab.plain_loss(session, base, batch)), rel=6e-7)
    assert abs(found.loss - deepseek_lab.forward(session, batch).loss) > 1e-3


def test_a_call_has_one_slice_per_layer_and_direction(deepseek_lab: Any, make_batch: Any) -> None:
    session = deepseek_lab.session()
    microbatches, layers = 2, deepseek_lab.twin.num_layers
    slices = list(session.forward_backward(make_batch(20, 20), CrossEntropy(), 20))
    # embedding, each layer forward, the loss: its tokens, one chunk, its sum; each layer backward
    assert len(slices) == microbatches * (1 + layers + 3 + layers)
    assert [each.kind for each in slices if each.may_switch] == ["embedding"] * microbatches
    # layer 0 has no experts
    assert [(each.kind, each.alike) for each in slices[: len(slices) // microbatches]] == [
        ("embedding", 1),
        ("forward dense", 1),
        ("forward experts", 2),
        ("forward experts", 1),
        ("loss begins", 1),
        ("loss and gradient", 1),
        ("loss ends", 1),
        ("backward experts", 2),
        ("backward experts", 1),
        ("backward dense", 1),
    ]


def test_a_call_without_backward_has_no_backward_slices(deepseek_lab: Any, make_batch: Any) -> None:
    slices = list(deepseek_lab.session().forward(make_batch(20), CrossEntropy(), 20))
    assert len(slices) == 1 + deepseek_lab.twin.num_layers + 3


def test_layers_below_the_lowest_adapted_one_are_not_recomputed(deepseek_lab: Any, make_batch: Any) -> None:
    session = deepseek_lab.session(["experts"])  # layer 0 is dense
    slices = list(session.forward_backward(make_batch(20), CrossEntropy(), 20))
    assert len(slices) == 1 + 3 + 3 + 2


@pytest.mark.slow
def test_a_call_that_dies_half_way_leaves_no_gradient(deepseek_lab: Any, batch: Any) -> None:
    session = deepseek_lab.session()
    deepseek_lab.forward_backward(session, batch)
    before = {name: value.clone() for name, value in session.gradient.items()}
    num_slices = len(list(deepseek_lab.session().forward_backward(batch, CrossEntropy(), 32)))
    for cut in (1, num_slices // 2, num_slices - 1):
        slices = session.forward_backward(batch, CrossEntropy(), 32)
        for _ in range(cut):
            next(slices)
        slices.close()
        assert all(torch.equal(before[name], value) for name, value in session.gradient.items())
    assert session.num_calls == 1


@pytest.mark.slow
def test_two_sessions_slice_by_slice_equal_each_alone_bit_for_bit(make_lab: Any, make_batch: Any) -> None:
    def alone(seed: int) -> list[float]:
        lab = make_lab()
        session = lab.session(seed=seed, fill=False)
        losses = []
        for step in range(3):
            losses.append(lab.forward_backward(session, make_batch(20, 9, seed=seed + step), 20).loss)
            lab.step(session)
        return losses

    lab = make_lab()
    sessions = {seed: lab.session(seed=seed, fill=False) for seed in (1, 2)}
    losses: dict[int, list[float]] = {1: [], 2: []}
    for step in range(3):
        works = {
            seed: session.forward_backward(make_batch(20, 9, seed=seed + step), CrossEntropy(), 20)
            for seed, session in sessions.items()
        }
        while works:
            for seed in list(works):
                try:
                    next(works[seed])
                except StopIteration as stop:
                    losses[seed].append(stop.value.loss)
                    del works[seed]
        for session in sessions.values():
            lab.step(session)
    assert losses[1] == alone(1)
    assert losses[2] == alone(2)


@pytest.mark.parametrize("targets", [["attention", "mlp"], ["all"]])
def test_dropout_is_the_same_when_a_layer_is_recomputed(deepseek_lab: Any, make_batch: Any, targets: list[str]) -> None:
    """The gradient is that of one graph over all layers, in which nothing is recomputed."""
    session, twin = deepseek_lab.session(targets, dropout=0.3), deepseek_lab.twin
    (microbatch,) = split(make_batch(12, 12), 100, torch.device("cpu"))
    call = Call(twin, deepseek_lab.lora, session.key, WeightedCrossEntropy(), True, seed=5)
    slices = training_call(call, [microbatch], 24)
    while True:
        try:
            next(slices)
        except StopIteration as stop:
            result = stop.value
            break
    hidden = twin.embed(microbatch.tokens)
    positions = twin.positions(hidden)
    for layer in range(twin.num_layers):
        with surroundings(call, microbatch, 0, layer, grad=True):
            hidden = twin.run_layer(layer, hidden, positions)
    logits = torch.nn.functional.linear(twin.final_norm(hidden).flatten(0, 1)[microbatch.real], twin.head)
    logprobs = logits.log_softmax(-1).gather(1, microbatch.targets[:, None])[:, 0]
    loss = -(logprobs * microbatch.weights).sum()
    parameters = [session.parameters[name].requires_grad_() for name in result.gradient]
    expected = torch.autograd.grad(loss, parameters)
    assert result.loss == pytest.approx(float(loss.detach()), rel=2.8e-7)  # 2.8e-8 measured, 6.5e-8 with AVX2
    assert abs(result.loss - deepseek_lab.forward(session, make_batch(12, 12)).loss) > 1e-3
    for name, wanted in zip(result.gradient, expected, strict=True):
        assert (result.gradient[name] - wanted).norm() <= 6e-6 * wanted.norm(), name  # 6.4e-7 measured


@pytest.mark.parametrize(("targets", "dropout"), [(["all"], 0.0), (["attention"], 0.3), (["all"], 0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_retained_activations_give_the_gradients_of_recomputed_ones_to_the_bit(
    make_lab: Any, batch: Any, family: str, dtype: torch.dtype, targets: list[str], dropout: float
) -> None:
    lab, calls = make_lab(family, dtype=dtype), {}
    for activations in ("recompute", "retain"):
        session = lab.session(targets, dropout=dropout)
        calls[activations] = lab.forward_backward(session, batch, 32, activations=activations)
    assert calls["retain"].loss == calls["recompute"].loss
    assert torch.equal(calls["retain"].logprobs, calls["recompute"].logprobs)
    assert calls["retain"].gradient.keys() == calls["recompute"].gradient.keys()
    for name, value in calls["recompute"].gradient.items():
        assert torch.equal(calls["retain"].gradient[name], value), name


def test_retained_activations_are_those_of_one_microbatch_and_of_its_experts(
    deepseek_lab: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, twin = deepseek_lab.session(), deepseek_lab.twin
    retained, plain = 0, ExpertLayer.forward_retaining

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal retained
        retained += 1
        return plain(*args, **kwargs)

    monkeypatch.setattr(ExpertLayer, "forward_retaining", counting)
    most = 0
    for _ in session.forward_backward(make_batch(20, 20), CrossEntropy(), 20, activations="retain"):
        gc.collect()
        alive = [kept.output for kept in gc.get_objects() if isinstance(kept, _Kept)]
        shapes = [None if output is None else tuple(output.shape) for output in alive]
        most = max(most, len(shapes))
        assert all(shape == (1, 20, 64) for shape in shapes)
    assert most == twin.num_layers
    assert retained == 2 * len(twin.experts)


def test_dropout_leaves_the_process_s_random_numbers_alone(deepseek_lab: Any, batch: Any) -> None:
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    deepseek_lab.forward_backward(deepseek_lab.session(["attention"], dropout=0.5), batch)
    assert torch.equal(torch.rand(3), expected)


def test_a_loss_that_is_not_finite_is_refused_and_leaves_no_gradient(deepseek_lab: Any, batch: Any) -> None:
    session = deepseek_lab.session(["attention"])
    with torch.no_grad():
        session.parameters["model.layers.0.self_attn.o_proj.lora_B"].fill_(float("inf"))
    with pytest.raises(NumericsError):
        deepseek_lab.forward_backward(session, batch)
    assert not session.gradient


@pytest.mark.slow
def test_training_leaves_the_base_weights_as_they_are(lab: Any, batch: Any) -> None:
    before = lab.fingerprint()
    session = lab.session()
    for _ in range(2):
        lab.forward_backward(session, batch)
        lab.step(session)
    assert lab.fingerprint() == before
    assert np.isfinite(lab.forward(session, batch).loss)
