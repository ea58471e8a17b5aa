"""Memory of a layer's hot experts on the device, in one of two forms.

model       weights in the model's dtype, ready to be multiplied
published   the expert store's bytes: codes and scales of the checkpoint, or of `--expert-format`. Two to four times as
            many experts fit. The experts that a call uses are dequantized into a scratch, right before their products

Both forms hold equal numbers for a bfloat16 model: the store's weight, rounded once (`packed.py`).

S slots, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from kt_runtime.experts.gpu.hot.packed import (
    BLOCK_ROWS,
    COLUMN_UNIT,
    MOST_WEIGHTS_AT_ONCE,
    TEMPORARY_BYTES,
    PackedFormat,
    PackedMatrix,
    formats_of,
    known_formats,
)
from kt_runtime.experts.values import ExpertShape

Form = Literal["model", "published"]
MOST_SCRATCH_BYTES = 128 << 20
"""Most bytes of dequantized weights in a scratch; one expert's weights if these are more."""


class CarriedLayer(Protocol):
    """An `ExpertLayer`: its weights, dequantized or as they are held."""

    @property
    def format(self) -> str: ...

    def unpack_range(self, first: int, count: int, w13: Tensor, w2: Tensor) -> None: ...

    def unpacked(self, expert: int) -> tuple[Tensor, Tensor, Tensor]: ...

    def copy_packed(self, expert: int, out: Tensor) -> None: ...


def expert_bytes(shape: ExpertShape, dtype: torch.dtype) -> int:
    """Bytes of a slot in the model's dtype: gate, up and down."""
    return 3 * shape.hidden * shape.intermediate * dtype.itemsize


def packed_matrices(shape: ExpertShape, formats: tuple[PackedFormat, PackedFormat]) -> tuple[PackedMatrix, ...]:
    """The packed matrices of an expert: gate, up and down."""
    gate = PackedMatrix(shape.intermediate, shape.hidden, formats[0])
    return gate, gate, PackedMatrix(shape.hidden, shape.intermediate, formats[1])


def slot_bytes(shape: ExpertShape, dtype: torch.dtype, form: Form, formats: Mapping[int, str]) -> dict[int, int]:
    """Layer -> bytes of a slot. `formats`: layer -> the store's format (`ExpertLayer.format`).

    Raises InvalidValueError for a published format that can't be dequantized on a device.
    """
    if form == "model":
        return dict.fromkeys(formats, expert_bytes(shape, dtype))
    known = known_formats(list(formats.values()))
    return {
        layer: sum(matrix.num_bytes for matrix in packed_matrices(shape, each))
        for layer, each in zip(formats, known, strict=True)
    }


def chosen_form(asked: Literal["auto"] | Form, formats: Mapping[int, str]) -> Form:
    """ "auto": published where some layer is quantized, and `packed.py` can dequantize all of them."""
    if asked != "auto":
        return asked
    is_quantized = any(name != "bf16" for name in formats.values())
    return "published" if is_quantized and all(map(formats_of, formats.values())) else "model"


def experts_at_once(shape: ExpertShape, dtype: torch.dtype) -> int:
    """Experts that a scratch holds."""
    return min(shape.num_experts, max(1, MOST_SCRATCH_BYTES // expert_bytes(shape, dtype)))


def scratch_bytes(shape: ExpertShape, dtype: torch.dtype) -> int:
    """Most bytes of the device that dequantizing takes in addition to the slots: scratch and intermediates."""
    at_once, rows, cols = experts_at_once(shape, dtype), shape.intermediate + COLUMN_UNIT, shape.hidden + COLUMN_UNIT
    weights = min(at_once * rows * cols, max(MOST_WEIGHTS_AT_ONCE, at_once * BLOCK_ROWS * max(rows, cols)))
    return at_once * expert_bytes(shape, dtype) + TEMPORARY_BYTES * weights


class PlainSlots:
    """`w13` [S, 2I, H] and `w2` [S, H, I] in `dtype` on `where`."""

    def __init__(self, shape: ExpertShape, num_slots: int, dtype: torch.dtype, where: torch.device) -> None:
        self.num_slots, self.dtype, self.format = num_slots, dtype, str(dtype).removeprefix("torch.")
        self.expert_bytes = expert_bytes(shape, dtype)
        self.w13 = torch.empty(num_slots, 2 * shape.intermediate, shape.hidden, dtype=dtype, device=where)
        self.w2 = torch.empty(num_slots, shape.hidden, shape.intermediate, dtype=dtype, device=where)

    @property
    def device(self) -> torch.device:
        return self.w13.device

    def carry(self, layer: CarriedLayer, expert: int, buffer: Tensor) -> None:
        """Writes what a slot holds of `expert` to `buffer`, uint8 [expert_bytes] of the host. Each weight is rounded
        once to the dtype."""
        w13, w2 = self._parts(buffer)
        if self.dtype == torch.bfloat16:
            layer.unpack_range(expert, 1, w13[None], w2[None])
            return
        gate, up, down = layer.unpacked(expert)
        w13[: len(gate)].copy_(gate)
        w13[len(gate) :].copy_(up)
        w2.copy_(down)

    def fill(self, slot: int, buffer: Tensor) -> None:
        """Queues the copy of a pinned `buffer` into a slot, on the current stream."""
        w13, w2 = self._parts(buffer)
        self.w13[slot].copy_(w13, non_blocking=True)
        self.w2[slot].copy_(w2, non_blocking=True)

    def _parts(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        w13, w2 = buffer.view(self.dtype).split((self.w13[0].numel(), self.w2[0].numel()))
        return w13.view(self.w13[0].shape), w2.view(self.w2[0].shape)


class Scratch:
    """Dequantized weights of some experts, for one call after the other in one lane: those of the last call are gone.

    `w13` [n, 2I, H], `w2` [n, H, I].
    """

    def __init__(self, shape: ExpertShape, dtype: torch.dtype, where: torch.device) -> None:
        size = experts_at_once(shape, dtype)
        self.w13 = torch.empty(size, 2 * shape.intermediate, shape.hidden, dtype=dtype, device=where)
        self.w2 = torch.empty(size, shape.hidden, shape.intermediate, dtype=dtype, device=where)


class PackedSlots:
    """`held` uint8 [S, bytes]: the packed matrices of gate, up and down. `scratch`: that of all layers."""

    def __init__(self, shape: ExpertShape, num_slots: int, store_format: str, scratch: Scratch) -> None:
        (formats,) = known_formats([store_format])
        self.num_slots, self.format, self.dtype = num_slots, store_format, scratch.w13.dtype
        self._shape, self._scratch = shape, scratch
        self._matrices = packed_matrices(shape, formats)
        self.expert_bytes = sum(matrix.num_bytes for matrix in self._matrices)
        self.held = torch.empty(num_slots, self.expert_bytes, dtype=torch.uint8, device=scratch.w13.device)

    @property
    def device(self) -> torch.device:
        return self.held.device

    @property
    def at_once(self) -> int:
        """Experts that `weights` gives at once, at most."""
        return len(self._scratch.w13)

    def carry(self, layer: CarriedLayer, expert: int, buffer: Tensor) -> None:
        """The store's bytes as they are: no thread of its pool is needed."""
        layer.copy_packed(expert, buffer)

    def fill(self, slot: int, buffer: Tensor) -> None:
        self.held[slot].copy_(buffer, non_blocking=True)

    def weights(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """w13 [n, 2I, H] and w2 [n, H, I] of the slots `chosen`, int64 [n] on the device. Valid until the next call."""
        count, inner = len(chosen), self._shape.intermediate
        w13, w2 = self._scratch.w13[:count], self._scratch.w2[:count]
        gate, _, down = (matrix.num_bytes for matrix in self._matrices)
        parts = self.held.split((gate, gate, down), dim=1)
        for matrix, part, out in zip(self._matrices, parts, (w13[:, :inner], w13[:, inner:], w2), strict=True):
            matrix.dequantize(part, chosen, out)
        return w13, w2
