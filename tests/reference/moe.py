"""The one reference for routed experts: plain loops over tokens, float64, autograd does the backward.

T tokens, K experts per token, H hidden, I intermediate, E experts, R rank. Nothing here is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from kt_runtime.families.stack import ExpertMlp

PLAIN = ExpertMlp()

Lora = tuple[Sequence[Tensor | None], float]
"""(gate_a, gate_b, up_a, up_b, down_a, down_b), each [E, R, in] or [E, out, R] or None in pairs; then the scaling."""


Mask = Callable[[int, int, int, int], Tensor | float]
"""Of a slot, token, expert and part (0 gate, 1 up, 2 down)."""


@dataclass(frozen=True)
class ReferenceExperts:
    gate: Tensor  # [E, I, H]; not used without a gate
    up: Tensor  # [E, I, H]
    down: Tensor  # [E, H, I]
    biases: tuple[Tensor, Tensor, Tensor] | None = None  # [E, I], [E, I], [E, H]
    mlp: ExpertMlp = PLAIN

    def double(self) -> ReferenceExperts:
        gate, up, down = self.gate.double(), self.up.double(), self.down.double()
        biases = (
            None if self.biases is None else (self.biases[0].double(), self.biases[1].double(), self.biases[2].double())
        )
        return ReferenceExperts(gate, up, down, biases, self.mlp)


def random_experts(num_experts: int, hidden: int, intermediate: int, seed: int = 0) -> ReferenceExperts:
    """bfloat16 weights with outputs of the order of their inputs."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, cols: int) -> Tensor:
        return (torch.randn(num_experts, rows, cols, generator=generator) / cols**0.5).bfloat16()

    return ReferenceExperts(matrix(intermediate, hidden), matrix(intermediate, hidden), matrix(hidden, intermediate))


def routed_experts(
    experts: ReferenceExperts,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    slots: Sequence[Lora | None] = (),
    token_slots: Tensor | None = None,
    mask: Mask = lambda *_: 1.0,
) -> Tensor:
    """sum over k of weights[t, k] * expert(ids[t, k], x[t]), in float64; ids of -1 contribute nothing.

    Arguments may be of any floating type and are widened; gradients flow to those that require them. `mask`: what the
    input of A is multiplied with.
    """
    wide = experts.double()
    rows = []
    for t in range(x.shape[0]):
        slot = -1 if token_slots is None else int(token_slots[t])
        lora = slots[slot] if slot >= 0 else None
        total = x[t].double() * 0.0  # part of the graph even where nothing is routed
        for k in range(ids.shape[1]):
            expert = int(ids[t, k])
            if expert >= 0:
                of_token = partial(mask, slot, t)
                total = total + weights[t, k].double() * one_expert(wide, expert, x[t].double(), lora, of_token)
        rows.append(total)
    return torch.stack(rows) if rows else x.double()


def one_expert(
    experts: ReferenceExperts, expert: int, x: Tensor, lora: Lora | None, mask: Callable[..., Tensor | float]
) -> Tensor:
    def project(part: int, rows: Tensor) -> Tensor:
        y = projection((experts.gate, experts.up, experts.down)[part][expert], rows, lora, part, expert, mask)
        return y if experts.biases is None else y + experts.biases[part][expert]

    up = project(1, x)
    gate = project(0, x) if experts.mlp.has_gate else up
    return project(2, activated(experts.mlp, gate, up))


def activated(mlp: ExpertMlp, gate: Tensor, up: Tensor) -> Tensor:
    """By PyTorch's own functions, whose autograd is the reference at the borders of clamps too."""
    limit, alpha = mlp.limit or 0.0, mlp.alpha or 0.0
    match mlp.activation:
        case "silu":
            return silu(gate) * up
        case "silu_clamped":
            return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        case "swigluoai":
            cut = gate.clamp(max=limit)
            return cut * torch.sigmoid(alpha * cut) * (up.clamp(-limit, limit) + 1)
        case "gelu":
            return gelu(gate) * up
        case "gelu_pytorch_tanh":
            return gelu(gate, approximate="tanh") * up
        case "relu2":
            return relu(up).square()
    raise AssertionError(mlp.activation)


def projection(
    weight: Tensor, x: Tensor, lora: Lora | None, part: int, expert: int, mask: Callable[..., Tensor | float]
) -> Tensor:
    """W x + scaling * B (A (mask x)); `part` is 0 for gate, 1 for up, 2 for down."""
    y = weight @ x
    if lora is None:
        return y
    tensors, scaling = lora
    a, b = tensors[2 * part], tensors[2 * part + 1]
    return (
        y
        if a is None or b is None
        else y + scaling * (b[expert].double() @ (a[expert].double() @ (x * mask(expert, part))))
    )
