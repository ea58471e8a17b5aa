"""One layer's routed experts.

Shapes: T tokens, K experts per token, H hidden, I intermediate, E experts, R LoRA rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kt_runtime import _experts, device
from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.experts.gpu import paths
from kt_runtime.experts.gpu.call import ExpertCall
from kt_runtime.experts.gpu.paths import DevicePaths
from kt_runtime.experts.gpu.streamed import StreamedActivations
from kt_runtime.experts.native import capsule, require_tensor, translate
from kt_runtime.experts.values import LORA_TENSORS, ExpertGradients, ExpertShape, LoraSlot, Retained
from kt_runtime.families.stack import SILU, ExpertMlp


class ExpertLayer:
    """The routed experts of one layer: sum over k of weights[t, k] * expert(ids[t, k], x[t]).

    `mlp`: what an expert computes. Adapters of experts without a gate have no `gate_a` and `gate_b`.

    A token's result depends on this token alone (with LoRA dropout also on the token's position in the batch): not on
    the other tokens, their order, their adapters or the number of threads. float32 activations are multiplied exactly
    with weights of every format; bfloat16 activations are quantized to int8 per group, or finer, if the weights are
    integers. Tensors of a device take one of `gpu.paths`: without `device_paths` they are staged. Thread-safe. Errors:
    InvalidValueError for a wrong shape, dtype, device, id or slot, and for a result tensor that aliases itself or an
    input; NumericsError for NaN or Inf in x, weights or grad_out; ConflictError once the store is closed.
    """

    def __init__(self, native: _experts.Layer, shape: ExpertShape, mlp: ExpertMlp) -> None:
        self._native: _experts.Layer | None = native
        self.shape = shape
        self.mlp = mlp
        self._device_paths: DevicePaths | None = None

    @property
    def device_paths(self) -> DevicePaths | None:
        return self._device_paths

    @device_paths.setter
    def device_paths(self, paths: DevicePaths | None) -> None:
        """Raises InvalidValueError for experts that `gpu.routed_mlp` does not compute: other than plain SwiGLU."""
        if paths is not None and not self.mlp.is_plain:
            biases = " with biases" if self.mlp.has_bias else ""
            raise InvalidValueError(
                f"experts with activation {self.mlp.activation!r}{biases} are computed by the CPU only; a GPU computes "
                f"{SILU!r} without biases: serve this model without experts on the GPU"
            )
        self._device_paths = paths

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        slots: Sequence[LoraSlot | None] = (),
        token_slots: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x [T, H] float32 or bfloat16; ids [T, K] int32 or int64, -1: not routed; weights [T, K] float32.

        token_slots [T] int32: index into `slots`, -1 for the base alone. Sums are float32; the result is rounded once
        to the dtype of x, or of `out` if it is given: that of x, or float32 in CPU memory. Not differentiable;
        `routed_experts` is.
        """
        return self._forward(ExpertCall(x, ids, weights, slots, token_slots), out, retain=False)[0]

    def combine(self, rows: Tensor, row_of: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """`forward`'s sums, with its bits, of rows that were computed elsewhere: out[t] = sum over k of
        weights[t, k] * rows[row_of[t, k]].

        rows [P, C] float32: outputs of pairs without their weights; row_of [T, K] int64: -1: not routed, no row twice;
        weights [T, K] float32; out [T, C] float32 or bfloat16. All in CPU memory.
        """
        try:
            self.native().combine(
                capsule(rows, "rows"), capsule(row_of, "row_of"), capsule(weights, "weights"), capsule(out, "out")
            )
        except _experts.NativeError as error:
            raise translate(error) from None
        return out

    def forward_retaining(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        slots: Sequence[LoraSlot | None] = (),
        token_slots: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Retained | StreamedActivations]:
        """`forward`, which also returns the activations that `backward` needs: 8 * I + 12 * R bytes per routed pair."""
        result, retained = self._forward(ExpertCall(x, ids, weights, slots, token_slots), out, retain=True)
        assert retained is not None
        return result, retained

    def _forward(
        self, call: ExpertCall, out: Tensor | None, *, retain: bool
    ) -> tuple[Tensor, Retained | StreamedActivations | None]:
        require_tensor(call.x, "x")
        if not device.is_host(call.x):
            return paths.forward(self, call, out, retain=retain)
        if out is None:
            out = torch.empty_like(call.x, memory_format=torch.contiguous_format, requires_grad=False)
        native = self.native()
        try:
            retained = native.forward(**_capsules(call), out=capsule(out, "out"), retain=retain)
        except _experts.NativeError as error:
            raise translate(error) from None
        return out, retained

    def backward(
        self,
        grad_out: Tensor,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        slots: Sequence[LoraSlot | None] = (),
        token_slots: Tensor | None = None,
        into: Sequence[LoraSlot | None] | None = None,
        retained: Retained | StreamedActivations | None = None,
        by_x: Tensor | None = None,
    ) -> ExpertGradients:
        """Gradients of `forward` with the other arguments, for grad_out [T, H].

        retained: the result of `forward_retaining` with the same arguments; None: activations are recomputed,
        bit-identically. The gradient treats rounding of activations to bfloat16 or int8 as the identity. The slots'
        gradients are added to `into` if given (float32 tensors of the slots' shapes), else are new tensors. `by_x`:
        where the gradient of x is written, if given: in x's dtype, or float32, in CPU memory.
        """
        require_tensor(x, "x")
        require_tensor(weights, "weights")
        call = ExpertCall(x, ids, weights, slots, token_slots)
        if not device.is_host(x):
            return paths.backward(self, grad_out, call, into, retained)
        if isinstance(retained, StreamedActivations):
            raise InvalidValueError("retained is of a call that streamed to a device; x is in CPU memory")
        native = self.native()
        given: Sequence[LoraSlot | None] = [None] * len(slots) if into is None else into
        if len(given) != len(slots):
            raise InvalidValueError(f"into has {len(given)} entries for {len(slots)} slots")
        grads = [g if g is not None or s is None else s.zeros() for s, g in zip(slots, given, strict=True)]
        if by_x is None:
            by_x = torch.empty_like(x, memory_format=torch.contiguous_format, requires_grad=False)
        result = ExpertGradients(
            by_x,
            torch.empty_like(weights, memory_format=torch.contiguous_format, requires_grad=False),
            grads,
        )
        try:
            native.backward(
                grad_out=capsule(grad_out, "grad_out"),
                **_capsules(call),
                x_grad=capsule(result.x, "gradient of x"),
                weights_grad=capsule(result.weights, "gradient of weights"),
                slot_grads=_slot_capsules(grads),
                retained=retained,
            )
        except _experts.NativeError as error:
            raise translate(error) from None
        return result

    def unpacked(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Dequantized copies of one expert's weights: gate [I, H] (without a gate [0, H]), up [I, H], down [H, I].

        bfloat16 for bf16 weights; float32 for other formats, whose scales are no bfloat16 numbers.
        """
        inner, hidden = self.shape.intermediate, self.shape.hidden
        dtype = torch.bfloat16 if self.format == "bf16" else torch.float32
        gate, up, down = (
            torch.empty(rows, cols, dtype=dtype, device="cpu")
            for rows, cols in ((inner if self.mlp.has_gate else 0, hidden), (inner, hidden), (hidden, inner))
        )
        try:
            self.native().unpack(expert, capsule(gate, "gate"), capsule(up, "up"), capsule(down, "down"))
        except _experts.NativeError as error:
            raise translate(error) from None
        return gate, up, down

    def unpack_range(self, first: int, count: int, w13: Tensor, w2: Tensor) -> None:
        """Writes experts first to first + count - 1, dequantized, to w13 [count, 2I, H] and w2 [count, H, I].

        Both are contiguous bfloat16 tensors in CPU memory. w13 has the rows of gate, then those of up; without a gate
        it is [count, I, H]. bf16 weights are copied, others rounded once from float32. All threads of the store's pool
        take part, without Python's lock.
        InvalidValueError: experts out of range, another shape, dtype or device, or tensors that share memory.
        """
        try:
            self.native().unpack_range(first, count, capsule(w13, "w13"), capsule(w2, "w2"))
        except _experts.NativeError as error:
            raise translate(error) from None

    def copy_packed(self, expert: int, out: Tensor) -> None:
        """Writes the packed matrices of gate, up and down (csrc/kernels/layout.h) to `out`, uint8 of their bytes in CPU
        memory. InvalidValueError: an expert out of range, or another number of bytes."""
        native, target, at = self.native(), out.numpy(), 0
        try:
            for part, node in product(range(3), range(native.num_nodes)):  # gate, up, down
                piece = np.frombuffer(memoryview(native.piece_bytes(expert, part, node)), np.uint8)
                if at + len(piece) <= len(target):
                    target[at : at + len(piece)] = piece
                at += len(piece)
        except _experts.NativeError as error:
            raise translate(error) from None
        if at != len(target):
            raise InvalidValueError(f"out has {len(target)} bytes; expert {expert} has {at}")

    @property
    def format(self) -> str:
        """The weights' format (csrc/kernels/format.h): "bf16", "fp8_e4m3_g128", "int8", "int4_g32", ..."""
        return self.native().format

    def native(self) -> _experts.Layer:
        if self._native is None:
            raise ConflictError("the expert store of this layer is closed")
        return self._native

    def close(self) -> None:
        """Releases the weights. Running calls finish first: they hold their own reference."""
        self._native = None


def _capsules(call: ExpertCall) -> dict[str, Any]:
    """The call's five arguments for the native side."""
    return {
        "x": capsule(call.x, "x"),
        "ids": capsule(call.ids, "ids"),
        "weights": capsule(call.weights, "weights"),
        "slots": _slot_capsules(call.slots),
        "token_slots": None if call.token_slots is None else capsule(call.token_slots, "token_slots"),
    }


def _slot_capsules(slots: Sequence[LoraSlot | None]) -> list[tuple[Any, ...] | None]:
    """Slots for the native side: each has six tensors in the order of LORA_TENSORS, scaling, dropout and its seed, and
    the numbers of tokens and experts that dropout counts."""
    return [None if slot is None else _one_slot(slot, f"slots[{i}]") for i, slot in enumerate(slots)]


def _one_slot(slot: LoraSlot, where: str) -> tuple[Any, ...]:
    made = [
        None if tensor is None else capsule(tensor, f"{where}.{name}")
        for name, tensor in zip(LORA_TENSORS, slot.tensors(), strict=True)
    ]
    tokens = None if slot.tokens is None else capsule(slot.tokens, f"{where}.tokens")
    return (*made, float(slot.scaling), float(slot.dropout), int(slot.seed), tokens, int(slot.first_expert))
