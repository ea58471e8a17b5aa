"""The layer in float64 with the original weights, on a few tokens: the reference for errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from kt_runtime.bench.experts.inputs import Batch
from kt_runtime.bench.experts.weights import Weights
from kt_runtime.experts import LoraSlot

TOKENS = 4  # for computing errors; fewer if the batch has fewer


@dataclass(frozen=True)
class ReferenceGradients:
    x: Tensor
    weights: Tensor
    lora: list[Tensor]  # in the order of LoraSlot.tensors(), full size


def forward(weights: Weights, batch: Batch) -> Tensor:
    """The layer's output, [T, H] float64."""
    return _layer(weights, batch.x.double(), batch.ids, batch.weights.double(), None, 0.0)


def gradients(weights: Weights, batch: Batch, lora: LoraSlot) -> ReferenceGradients:
    x = batch.x.double().requires_grad_()
    routing = batch.weights.double().requires_grad_()
    leaves = {
        expert: [t[expert].double().requires_grad_() for t in lora.tensors() if t is not None]
        for expert in batch.ids.unique().tolist()
    }
    _layer(weights, x, batch.ids, routing, leaves, lora.scaling).backward(batch.grad_out.double())
    full = [torch.zeros(t.shape, dtype=torch.float64) for t in lora.tensors() if t is not None]
    for expert, tensors in leaves.items():
        for whole, leaf in zip(full, tensors, strict=True):
            assert leaf.grad is not None
            whole[expert] = leaf.grad
    assert x.grad is not None and routing.grad is not None
    return ReferenceGradients(x.grad, routing.grad, full)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|, Frobenius norms."""
    return float((got.double() - wanted).norm() / wanted.norm())


def _layer(
    weights: Weights, x: Tensor, ids: Tensor, routing: Tensor, lora: dict[int, list[Tensor]] | None, scaling: float
) -> Tensor:
    rows = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        matrices = [matrix.double() for matrix in weights.expert(expert).values()]
        pairs = lora[expert] if lora is not None else None

        def project(
            part: int, inputs: Tensor, matrices: list[Tensor] = matrices, pairs: list[Tensor] | None = pairs
        ) -> Tensor:
            y = inputs @ matrices[part].t()
            return y if pairs is None else y + scaling * (inputs @ pairs[2 * part].t() @ pairs[2 * part + 1].t())

        inputs = x[token]
        y = project(2, silu(project(0, inputs)) * project(1, inputs))
        rows = rows.index_add(0, token, routing[token, choice, None] * y)
    return rows
