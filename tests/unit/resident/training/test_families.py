"""Training in the families beside DeepSeek and Qwen3-MoE: logits, gradients and memory against Hugging Face's model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference.delta_net import hugging_face_in_float64, without_float32

from kt_runtime.families import EXPERTS
from kt_runtime.resident.twin.batches import TrainingBatch

RELATIVE_ERROR = 1e-5  # of a gradient's norm


def gradients(lab: Any, batch: TrainingBatch) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A session, its parameters' gradients, and those that autograd finds in Hugging Face's model in float64."""
    session = lab.session()
    values = {name: parameter.detach().double().requires_grad_() for name, parameter in session.parameters.items()}
    exact = copy.deepcopy(lab.host.hf).double()
    exact.config._experts_implementation = "eager"  # the others have no float64
    with hugging_face_in_float64(), without_float32():
        loss = lab.plain_loss(session, values, batch, exact)
    found = lab.forward_backward(session, batch)
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)  # 1.2e-7 measured
    expected = [gradient.float() for gradient in torch.autograd.grad(loss, list(values.values()))]
    return session, dict(session.gradient), dict(zip(values, expected, strict=True))


def test_gradients_of_every_module_are_autograd_s(further_lab: Any, batch: TrainingBatch) -> None:
    session, found, expected = gradients(further_lab, batch)
    assert found.keys() == expected.keys()
    assert {module.group for module in session.modules} >= {"attention", EXPERTS}
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= RELATIVE_ERROR * gradient.norm(), name


def test_the_twin_keeps_no_weights_of_its_own(further_lab: Any) -> None:
    assert further_lab.twin.copied_bytes == 0
    storages = {tensor.untyped_storage().data_ptr() for tensor in further_lab.host.tensors().values()}
    views = further_lab.twin.views()
    assert views and all(view.untyped_storage().data_ptr() in storages for view in views.values())


def test_a_step_of_routed_experts_changes_the_loss_and_the_base_s_weights_not(
    further_lab: Any, batch: TrainingBatch
) -> None:
    session = further_lab.session(["experts"], fill=False)
    assert {module.group for module in session.modules} == {EXPERTS}
    before, weights = further_lab.forward(session, batch).loss, further_lab.fingerprint()
    for _ in range(3):
        further_lab.forward_backward(session, batch)
        further_lab.step(session)
    assert further_lab.forward(session, batch).loss < before
    assert further_lab.fingerprint() == weights
    assert all(bool(parameter.any()) for parameter in session.parameters.values())
