"""The MLPs of routed experts on a device, forward and backward, for rows sorted by expert.

Products are `torch.nn.functional.grouped_mm` where device and dtype have it: float32 sums, a result rounded to
bfloat16, and no synchronisation. Elsewhere they are a loop over the experts in float32, also on CPU tensors. SwiGLU,
LoRA and the sums of gradients are float32. The weights are those of the CPU store, dequantized to bfloat16 (or the
model's dtype): their gradient is not computed.

R rows, n experts of a chunk, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from kt_runtime.device import is_host
from kt_runtime.experts.gpu.adapters import DOWN, GATE, UP, AdapterRows
from kt_runtime.experts.values import LoraSlot

ALIGNED_BYTES = 16  # alignment of the rows of every factor of a grouped product


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of some experts on the device, and the rows that go to each of them."""

    w13: Tensor
    """[n, 2I, H]: gate, then up."""
    w2: Tensor
    """[n, H, I]."""
    ends: Sequence[int]
    """The row after the last one of each expert, on the host."""
    device_ends: Tensor
    """The same, int32 [n] on the device. Rows after the last end are of no expert, and so are their results."""


def expert_forward(
    weights: ExpertWeights, x: Tensor, adapters: Sequence[AdapterRows | None] = ()
) -> tuple[Tensor, Tensor]:
    """x [R, H] -> the experts' outputs [R, H] without routing weights, and gate and up [R, 2I] before SwiGLU.

    Both are float32, or bfloat16 where a grouped product gave them and no adapter was added. `expert_backward` may be
    given the second one.
    """
    gate_up = _gate_up(weights, x, adapters)
    gate, up = gate_up.float().chunk(2, dim=1)
    h = silu(gate) * up
    y = _product(h.to(x.dtype), weights.w2.transpose(1, 2), weights)
    for rows in adapters:
        if rows is not None and rows.has(DOWN):
            y = y.float()
            rows.added(DOWN, h, y)
    return y, gate_up


def expert_backward(
    weights: ExpertWeights,
    x: Tensor,
    by_y: Tensor,
    routing: Tensor,
    adapters: Sequence[AdapterRows | None] = (),
    into: Sequence[LoraSlot | None] = (),
    gate_up: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`by_y` [R, H]: the gradient with respect to the token's sum. `routing` [R] float32: the rows' routing weights.

    Returns the gradients with respect to x [R, H] and to the routing weights [R], both float32. The gradients of the
    adapters are added to `into`, a float32 slot for each adapter. `gate_up`: the second result of `expert_forward`;
    None: it is computed again.
    """
    gate_up = _gate_up(weights, x, adapters) if gate_up is None else gate_up
    gate, up = gate_up.float().chunk(2, dim=1)
    sigmoid = torch.sigmoid(gate)
    h = gate * sigmoid * up
    by_h = _product(by_y.to(x.dtype), weights.w2, weights).float()
    for rows, gradient in zip(adapters, into, strict=True):
        if rows is not None:
            rows.backward(DOWN, h, by_y.float(), by_h, gradient, routing[:, None])
    by_routing = (h * by_h).sum(1)
    by_h = by_h * routing[:, None]
    by_gate = by_h * up * sigmoid * (1 + gate * (1 - sigmoid))
    by_up = by_h * gate * sigmoid
    by_x = _product(torch.cat([by_gate, by_up], dim=1).to(x.dtype), weights.w13, weights).float()
    for rows, gradient in zip(adapters, into, strict=True):
        if rows is not None:
            rows.backward(GATE, x.float(), by_gate, by_x, gradient)
            rows.backward(UP, x.float(), by_up, by_x, gradient)
    return by_x, by_routing


def _gate_up(weights: ExpertWeights, x: Tensor, adapters: Sequence[AdapterRows | None]) -> Tensor:
    gate_up = _product(x, weights.w13.transpose(1, 2), weights)
    for rows in adapters:
        if rows is not None and (rows.has(GATE) or rows.has(UP)):
            gate_up = gate_up.float()
            gate, up = gate_up.chunk(2, dim=1)  # views
            rows.added(GATE, x.float(), gate)
            rows.added(UP, x.float(), up)
    return gate_up


def _product(rows: Tensor, matrices: Tensor, weights: ExpertWeights) -> Tensor:
    """rows [R, K] by the matrix [K, N] of each row's expert -> [R, N]."""
    rows = rows.contiguous()
    if rows.dtype == matrices.dtype and has_grouped_products(rows.device, rows.dtype, rows.shape[1], matrices.shape[2]):
        return grouped_mm(rows, matrices, offs=weights.device_ends)
    out = torch.zeros(rows.shape[0], matrices.shape[2], dtype=torch.float32, device=rows.device)
    for index, (begin, end) in enumerate(zip((0, *weights.ends[:-1]), weights.ends, strict=True)):
        if end > begin:
            out[begin:end] = rows[begin:end].float() @ matrices[index].float()
    return out


def has_grouped_products(device: torch.device, dtype: torch.dtype, *columns: int) -> bool:
    """Whether the device multiplies groups of bfloat16 rows of these lengths without a loop."""
    aligned = all(count * dtype.itemsize % ALIGNED_BYTES == 0 for count in columns)
    return aligned and dtype == torch.bfloat16 and not is_host(device) and _multiplies_groups(device)


@cache
def _multiplies_groups(device: torch.device) -> bool:
    """One trial decides: there are many backends and capabilities, and PyTorch reports a missing one by an error."""
    rows, matrices = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in ((8, 16), (1, 16, 16)))
    try:
        grouped_mm(rows, matrices, offs=torch.full((1,), 8, dtype=torch.int32, device=device))
    except (RuntimeError, NotImplementedError):
        return False
    return True
