from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear as PeftLinear

from kt_runtime.resident.twin.lora import LoraModules


def test_b_begins_at_zero_and_a_within_peft_s_bounds(deepseek_lab: Any) -> None:
    session = deepseek_lab.session(fill=False)
    for module in session.modules:
        a, b = session.parameters[f"{module.name}.lora_A"], session.parameters[f"{module.name}.lora_B"]
        assert not b.any()
        assert a.abs().max() <= module.in_features**-0.5
        assert a.std() > 0.4 * module.in_features**-0.5
        assert a.dtype == b.dtype == torch.float32


def test_initial_values_depend_on_seed_and_module_alone(deepseek_lab: Any) -> None:
    everything, some = deepseek_lab.session(fill=False), deepseek_lab.session(["o_proj"], fill=False)
    other = deepseek_lab.session(["o_proj"], fill=False, seed=4)
    name = "model.layers.1.self_attn.o_proj.lora_A"
    assert torch.equal(everything.parameters[name], some.parameters[name])
    assert not torch.equal(everything.parameters[name], other.parameters[name])
    second = "model.layers.2.self_attn.o_proj.lora_A"
    assert not torch.equal(some.parameters[name], some.parameters[second])


def test_creating_a_session_leaves_the_process_s_random_numbers_alone(deepseek_lab: Any) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    deepseek_lab.session()
    assert torch.equal(torch.rand(3), expected)


def test_a_closed_session_leaves_the_plain_modules_behind(deepseek_lab: Any, batch: Any) -> None:
    first, second = deepseek_lab.session(), deepseek_lab.session(["attention"])
    expected = deepseek_lab.forward(second, batch)
    first.close()
    assert torch.equal(deepseek_lab.forward(second, batch).logprobs, expected.logprobs)
    second.close()
    model = deepseek_lab.twin._model
    assert not any(isinstance(module, PeftLinear) for module in model.modules())
    assert not any(experts.adapters for experts in deepseek_lab.twin.experts.values())


def test_an_adapter_that_does_not_fit_into_memory_leaves_nothing_behind(
    deepseek_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap, calls = LoraModules._wrap, []

    def full(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 4:
            raise MemoryError
        wrap(*arguments)

    monkeypatch.setattr(LoraModules, "_wrap", full)
    with pytest.raises(MemoryError):
        deepseek_lab.session(["attention"])
    assert len(calls) == 4
    assert not any(isinstance(module, PeftLinear) for module in deepseek_lab.twin._model.modules())
    assert not deepseek_lab.lora._modules


def test_one_session_does_not_change_another_s_result(deepseek_lab: Any, batch: Any) -> None:
    session = deepseek_lab.session()
    alone = deepseek_lab.forward(session, batch)
    deepseek_lab.session(seed=9)
    assert torch.equal(deepseek_lab.forward(session, batch).logprobs, alone.logprobs)


@pytest.mark.slow
def test_dropout_on_routed_experts_changes_training_and_nothing_else(lab: Any, batch: Any) -> None:
    session, other = lab.session(["experts"], dropout=0.4), lab.session(["experts"], dropout=0.0)
    assert torch.equal(lab.forward(session, batch).logprobs, lab.forward(other, batch).logprobs)
    first = lab.forward_backward(session, batch)
    gradient = {name: value.clone() for name, value in first.gradient.items()}  # the second call adds to it
    second, plain = lab.forward_backward(session, batch), lab.forward_backward(other, batch)
    assert first.loss != plain.loss and first.loss != second.loss
    assert first.loss == pytest.approx(plain.loss, rel=0.05)
    again = lab.session(["experts"], dropout=0.4)
    repeated = lab.forward_backward(again, batch)
    assert repeated.loss == first.loss
    assert all(torch.equal(repeated.gradient[name], value) for name, value in gradient.items())


def test_single_projections_of_the_experts_can_be_adapted(lab: Any, batch: Any) -> None:
    session = lab.session(["down_proj"])
    result = lab.forward_backward(session, batch)
    values = {name: value.detach().clone().requires_grad_() for name, value in session.parameters.items()}
    expected = lab.plain_loss(session, values, batch)
    expected.backward()
    assert result.loss == pytest.approx(float(expected.detach()), rel=8e-7)  # 8.5e-8 measured
    for name, value in values.items():
        assert (session.gradient[name] - value.grad).norm() <= 9e-6 * value.grad.norm(), name  # 9.3e-7 measured
