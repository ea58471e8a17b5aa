"""The one reference for routed experts: plain loops over experts, float64, autograd does the backward.

T tokens, K experts per token, H hidden, I intermediate, E experts, R rank.
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
    mask: Mask | None = None,
) -> Tensor:
    """sum over k of weights[t, k] * expert(ids[t, k], x[t]), in float64; ids of -1 contribute nothing.

    Arguments may be of any floating type and are widened; gradients flow to those that require them. `mask`: what the
    input of A is multiplied with.
    """
    wide, rows = experts.double(), x.double()
    slot_of = torch.full((len(x),), -1) if token_slots is None else token_slots
    total = rows * 0.0  # part of the graph even where nothing is routed
    for expert in range(len(experts.up)):
        for slot in range(-1, len(slots)):  # the rows of one expert and slot together
            at, k = torch.nonzero((ids == expert) & (slot_of == slot)[:, None], as_tuple=True)
            if len(at) == 0:
                continue
            masks = None if mask is None else partial(masks_of, mask, slot, at.tolist(), expert)
            out = one_expert(wide, expert, rows[at], slots[slot] if slot >= 0 else None, masks)
            total = total.index_add(0, at, weights[at, k, None].double() * out)
    return total


def masks_of(mask: Mask, slot: int, tokens: list[int], expert: int, part: int) -> Tensor:
    """A row for each token."""
    return torch.stack([torch.as_tensor(mask(slot, token, expert, part)).double().reshape(-1) for token in tokens])


def one_expert(
    experts: ReferenceExperts, expert: int, x: Tensor, lora: Lora | None, masks: Callable[[int], Tensor] | None
) -> Tensor:
    """Of the rows of x."""

    def project(part: int, rows: Tensor) -> Tensor:
        weight, mask = (experts.gate, experts.up, experts.down)[part][expert], None if masks is None else masks(part)
        y = projection(weight, rows, lora, part, expert, mask)
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


def projection(weight: Tensor, x: Tensor, lora: Lora | None, part: int, expert: int, mask: Tensor | None) -> Tensor:
    """W x + scaling * B (A (mask x)) of each row x; `part` is 0 for gate, 1 for up, 2 for down."""
    y = x @ weight.T
    if lora is None:
        return y
    tensors, scaling = lora
    a, b = tensors[2 * part], tensors[2 * part + 1]
    if a is None or b is None:
        return y
    kept = x if mask is None else x * mask
    return y + scaling * (kept @ a[expert].double().T @ b[expert].double().T)
