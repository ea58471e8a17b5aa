"""One shape's weights, inputs and references, made once: the same for every format, thread count and peer.

In a model with many layers, a layer's weights have left the CPU caches before the layer runs again. The benchmark keeps
them cold too: with few tokens, successive calls cycle through a shuffled list of experts, so an expert is read again
only after all others. If one call needs more than all experts, each token's experts are random, and a call reads nearly
the whole layer.

The reference for errors is the layer in float64 with the original weights, on a few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from kt_runtime.bench.experts.plan import PLAIN, BenchShape
from kt_runtime.experts import LoraSlot
from kt_runtime.families.stack import ExpertMlp

DEVIATION = 0.02
QUANTILES = 1 << 16
LORA_SCALING = 2.0
MOST_BATCHES = 64
REFERENCE_TOKENS = 4  # for computing errors; fewer if the batch has fewer


@dataclass(frozen=True)
class Weights:
    """Random weights of one layer."""

    gate_up: Tensor  # [E, 2I, H] bfloat16: gate, then up; without a gate [E, I, H]
    down: Tensor  # [E, H, I] bfloat16
    mlp: ExpertMlp = PLAIN

    def expert(self, index: int) -> dict[str, Tensor]:
        """Views: gate_proj [I, H], up_proj [I, H], down_proj [H, I]."""
        parts = ("gate_proj", "up_proj") if self.mlp.has_gate else ("up_proj",)
        made = dict(zip(parts, self.gate_up[index].chunk(len(parts)), strict=True))
        return {**made, "down_proj": self.down[index]}

    def biases(self, index: int) -> dict[str, Tensor]:
        """The bias of each matrix, float32, the same for every expert; empty for an MLP without biases."""
        if not self.mlp.has_bias:
            return {}
        return {name: torch.linspace(-1, 1, len(matrix)) for name, matrix in self.expert(index).items()}


def random_weights(shape: BenchShape, seed: int = 0) -> Weights:
    """Normal(0, 0.02) in bfloat16."""
    generator = np.random.PCG64(seed)
    table = _quantiles()
    inputs = 2 if shape.mlp.has_gate else 1
    gate_up = torch.empty(shape.num_experts, inputs * shape.intermediate, shape.hidden, dtype=torch.bfloat16)
    down = torch.empty(shape.num_experts, shape.hidden, shape.intermediate, dtype=torch.bfloat16)
    for expert in range(shape.num_experts):
        for matrix in (gate_up[expert], down[expert]):
            _fill(matrix, generator, table)
    return Weights(gate_up, down, shape.mlp)


def _fill(matrix: Tensor, generator: np.random.PCG64, table: np.ndarray) -> None:
    """Fills `matrix`: 16 random bits choose a quantile. Ten times as fast as drawing normal numbers; bf16 hardly
    resolves more."""
    count = matrix.numel()
    bits = generator.random_raw(-(-count // 4)).view(np.uint16)[:count]
    matrix.view(torch.int16).numpy().reshape(-1)[:] = table[bits]


def _quantiles() -> np.ndarray:
    """The quantiles as bfloat16, stored in int16."""
    middle = (torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES
    return (torch.special.ndtri(middle) * DEVIATION).bfloat16().view(torch.int16).numpy()


@dataclass(frozen=True)
class Batch:
    x: Tensor  # [T, H] bfloat16, normal(0, 1)
    ids: Tensor  # [T, K] int32, distinct within a token
    weights: Tensor  # [T, K] float32, softmax of normal numbers
    grad_out: Tensor  # [T, H] bfloat16, normal(0, 1)

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def touched_experts(self) -> int:
        return self.ids.unique().numel()

    def first(self, num_tokens: int) -> Batch:
        return Batch(*(t[:num_tokens].contiguous() for t in (self.x, self.ids, self.weights, self.grad_out)))


def make_batches(shape: BenchShape, num_tokens: int) -> list[Batch]:
    """Batches for successive calls; all touch the same number of experts."""
    generator = torch.Generator().manual_seed(num_tokens)
    return [
        Batch(
            torch.randn(num_tokens, shape.hidden, generator=generator).bfloat16(),
            ids,
            torch.randn(num_tokens, shape.top_k, generator=generator).softmax(1),
            torch.randn(num_tokens, shape.hidden, generator=generator).bfloat16(),
        )
        for ids in _routings(shape, num_tokens, generator)
    ]


def _routings(shape: BenchShape, num_tokens: int, generator: torch.Generator) -> list[Tensor]:
    """[T, K] int32 for each batch."""
    wanted = num_tokens * shape.top_k
    if wanted > shape.num_experts:
        scores = torch.rand(num_tokens, shape.num_experts, generator=generator)
        return [scores.topk(shape.top_k).indices.int()]
    deck = torch.randperm(shape.num_experts, generator=generator).int()
    num_batches = min(MOST_BATCHES, shape.num_experts)
    cards = torch.arange(num_batches * wanted) % shape.num_experts
    return list(deck[cards].view(num_batches, num_tokens, shape.top_k))


def make_lora(shape: BenchShape) -> LoraSlot:
    """bfloat16, all projections of every expert; neither A nor B is zero."""
    generator = torch.Generator().manual_seed(1)
    experts, rank, hidden, inner = shape.num_experts, shape.rank, shape.hidden, shape.intermediate

    def pair(cols: int, rows: int) -> tuple[Tensor, Tensor]:
        a = torch.randn(experts, rank, cols, generator=generator) / cols**0.5
        b = torch.randn(experts, rows, rank, generator=generator) * 0.02
        return a.bfloat16(), b.bfloat16()

    gate = pair(hidden, inner)
    slot = LoraSlot(*gate, *pair(hidden, inner), *pair(inner, hidden), scaling=LORA_SCALING)
    return slot if shape.mlp.has_gate else replace(slot, gate_a=None, gate_b=None)


@dataclass(frozen=True)
class ReferenceGradients:
    x: Tensor
    weights: Tensor
    lora: list[Tensor]  # in the order of LoraSlot.tensors(), full size


def _reference_forward(weights: Weights, batch: Batch) -> Tensor:
    """The layer's output, [T, H] float64."""
    return _layer(weights, batch.x.double(), batch.ids, batch.weights.double(), None, 0.0)


def _reference_gradients(weights: Weights, batch: Batch, lora: LoraSlot) -> ReferenceGradients:
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
        matrices, biases = weights.expert(expert), weights.biases(expert)
        pairs = lora[expert] if lora is not None else None

        def project(
            name: str,
            inputs: Tensor,
            matrices: dict[str, Tensor] = matrices,
            biases: dict[str, Tensor] = biases,
            pairs: list[Tensor] | None = pairs,
        ) -> Tensor:
            y = inputs @ matrices[name].double().t()
            if biases:
                y = y + biases[name].double()
            part = list(matrices).index(name)
            return y if pairs is None else y + scaling * (inputs @ pairs[2 * part].t() @ pairs[2 * part + 1].t())

        inputs = x[token]
        up = project("up_proj", inputs)
        gate = project("gate_proj", inputs) if weights.mlp.has_gate else up
        y = project("down_proj", _activated(weights.mlp, gate, up))
        rows = rows.index_add(0, token, routing[token, choice, None] * y)
    return rows


def _activated(mlp: ExpertMlp, gate: Tensor, up: Tensor) -> Tensor:
    limit, alpha = mlp.limit or 0.0, mlp.alpha or 0.0
    if mlp.limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    match mlp.activation:
        case "swigluoai":
            return gate * torch.sigmoid(alpha * gate) * (up + 1)
        case "gelu":
            return gelu(gate) * up
        case "gelu_pytorch_tanh":
            return gelu(gate, approximate="tanh") * up
        case "relu2":
            return relu(up).square()
        case _:
            return silu(gate) * up


class LayerCase:
    """Weights, inputs and references of `shape`, each made when it is first used, except the weights."""

    def __init__(self, shape: BenchShape) -> None:
        self.shape = shape
        self.weights = random_weights(shape)
        self.batches = cache(self._batches)
        self.expected = cache(self._expected)
        self.expected_gradients = cache(self._expected_gradients)

    @cached_property
    def lora(self) -> LoraSlot:
        return make_lora(self.shape)

    def few(self, tokens: int) -> Batch:
        """The first tokens of the first batch, on which errors are computed."""
        return self.batches(tokens)[0].first(REFERENCE_TOKENS)

    def _batches(self, tokens: int) -> list[Batch]:
        return make_batches(self.shape, tokens)

    def _expected(self, tokens: int) -> Tensor:
        return _reference_forward(self.weights, self.few(tokens))

    def _expected_gradients(self, tokens: int) -> ReferenceGradients:
        return _reference_gradients(self.weights, self.few(tokens), self.lora)
