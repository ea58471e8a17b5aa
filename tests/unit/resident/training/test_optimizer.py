from __future__ import annotations

import pytest
import torch

from kt_runtime.adapters.tensors import thread_pool
from kt_runtime.errors import InvalidValueError, NumericsError
from kt_runtime.resident.scheduler import run_at_once
from kt_runtime.resident.training import optimizer, portions
from kt_runtime.resident.training.optimizer import AdamW, StepSettings, clip


def parameters(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"m.lora_A": (4, 16), "m.lora_B": (16, 4), "n.lora_A": (8, 4, 16), "n.lora_B": (8, 16, 4)}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    return {name: value.detach() * 0.3 for name, value in parameters(100 + step).items()}


@pytest.mark.parametrize("ratio", [1.0, 16.0])
@pytest.mark.parametrize("slice_elements", [1, 1 << 22], ids=["one parameter a slice", "one slice"])
@pytest.mark.parametrize("piece_elements", [None, 7, 1 << 20], ids=["no threads", "in pieces", "whole"])
def test_steps_equal_torch_s_adamw_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, ratio: float, slice_elements: int, piece_elements: int | None
) -> None:
    monkeypatch.setattr(portions, "SLICE_ELEMENTS", slice_elements)
    monkeypatch.setattr(optimizer, "PIECE_ELEMENTS", piece_elements or 1)
    ours, theirs = parameters(), parameters()
    groups = [
        {"params": [value for name, value in theirs.items() if name.endswith("A")], "lr": 1e-3},
        {"params": [value for name, value in theirs.items() if name.endswith("B")], "lr": 1e-3 * ratio},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    threads = thread_pool("kt-test") if piece_elements else None
    adamw = AdamW(ours, threads=threads)
    for step in range(10):
        for name, value in gradients(step).items():
            theirs[name].grad = value
        reference.step()
        settings = StepSettings(1e-3, beta2=0.95, weight_decay=0.1, lora_plus_ratio=ratio)
        slices = len(list(adamw.apply(gradients(step), settings)))
        assert slices == (4 if slice_elements == 1 else 1)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert all(float(each) == 10 for each in adamw.steps.values())
    if threads is not None:
        threads.shutdown()


def test_clipping_equals_torch_s() -> None:
    ours, theirs = gradients(0), parameters()
    for name, value in gradients(0).items():
        theirs[name].grad = value
    expected = torch.nn.utils.clip_grad_norm_([theirs[name] for name in sorted(theirs)], 0.5)
    assert run_at_once(clip(ours, 0.5)) == float(expected)
    for name, value in ours.items():
        wanted = theirs[name].grad
        assert wanted is not None and torch.equal(value, wanted), name


def test_no_clipping_leaves_the_gradient_as_it_is() -> None:
    ours = gradients(0)
    assert run_at_once(clip(ours, 0.0)) > 1
    assert all(torch.equal(value, gradients(0)[name]) for name, value in ours.items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    broken = gradients(0)
    broken["n.lora_A"][3, 2, 1] = bad
    with pytest.raises(NumericsError, match=r"n\.lora_A"):
        run_at_once(clip(broken, 1.0))


def test_restored_state_continues_bit_for_bit() -> None:
    settings = StepSettings(1e-2)
    ours = parameters()
    adamw = AdamW(ours)
    for step in range(3):
        list(adamw.apply(gradients(step), settings))
    copied = {name: torch.nn.Parameter(value.detach().clone()) for name, value in ours.items()}
    restored = AdamW(copied)
    list(restored.restore({name: value.clone() for name, value in adamw.tensors().items()}))
    for step in range(3, 6):
        list(adamw.apply(gradients(step), settings))
        list(restored.apply(gradients(step), settings))
    assert all(torch.equal(value, copied[name]) for name, value in ours.items())


EXTREME = {
    "rate over epsilon": StepSettings(1e4, epsilon=1e-30),
    "no bias in the first moment": StepSettings(1e4, beta1=0.0, beta2=0.999999999, epsilon=1e-30),
    "a decay of more than everything": StepSettings(1e4, weight_decay=1e4),
    "LoRA+": StepSettings(1e4, epsilon=1e-30, lora_plus_ratio=1e4),
}


@pytest.mark.parametrize("settings", EXTREME.values(), ids=EXTREME.keys())
def test_a_step_that_could_leave_float32_is_refused_before_anything_changes(settings: StepSettings) -> None:
    """Repeated until it is refused: every step before has left finite numbers."""
    ours = parameters()
    adamw = AdamW(ours)
    for step in range(200):
        gradient = {name: value * 1e15 for name, value in gradients(step).items()}
        norm = run_at_once(clip(gradient, 0.0))
        before = {name: value.detach().clone() for name, value in ours.items()}
        state = {name: value.clone() for name, value in adamw.tensors().items()}
        try:
            run_at_once(adamw.check_range(norm, settings))
        except InvalidValueError as error:
            assert "no step was made" in str(error)
            assert all(torch.equal(before[name], value) for name, value in ours.items())
            assert all(torch.equal(state[name], value) for name, value in adamw.tensors().items())
            return
        list(adamw.apply(gradient, settings))
        assert all(torch.isfinite(value).all() for value in ours.values())
        assert all(torch.isfinite(value).all() for value in adamw.tensors().values())
    raise AssertionError("never refused")


def test_the_range_costs_nothing_with_settings_that_train() -> None:
    adamw, settings = AdamW(parameters()), StepSettings(1e-3, weight_decay=0.1)
    slices = []
    for step in range(50):
        gradient = gradients(step)
        norm = run_at_once(clip(gradient, 1.0))
        slices += list(adamw.check_range(min(norm, 1.0), settings))
        list(adamw.apply(gradient, settings))
    assert len(slices) == 1  # the first step measures the parameters


def test_a_gradient_whose_square_would_overflow_is_refused() -> None:
    with pytest.raises(NumericsError, match="norm"):
        run_at_once(clip({"m.lora_A": torch.full((4,), 1e18)}, 1.0))
