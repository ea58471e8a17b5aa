"""The arguments of a call on a layer of experts, and their checks where the tensors are on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kt_runtime.errors import InvalidValueError, NumericsError
from kt_runtime.experts.values import LORA_TENSORS, ExpertShape, LoraSlot

ACTIVATIONS = (torch.float32, torch.bfloat16)
INDICES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Check:
    """A check of values whose result the device gives later: `bad` [T, any] or [T] marks wrong values, for which
    `error` is raised."""

    name: str
    values: Tensor
    bad: Tensor
    error: type[InvalidValueError | NumericsError]
    allowed: str

    def failure(self, token: int) -> InvalidValueError | NumericsError:
        """For the first bad value of a token. Waits for the device."""
        column = int(self.bad[token].reshape(-1).to(torch.int64).argmax())
        place = f"{token}, {column}" if self.values.dim() > 1 else str(token)
        found = self.values[token].reshape(-1)[column].item()
        text = "NaN or Inf" if self.error is NumericsError else f"{found}; allowed: {self.allowed}"
        return self.error(f"{self.name}[{place}] is {text}")


@dataclass(frozen=True)
class ExpertCall:
    """The arguments of `ExpertLayer.forward`, with its shapes. All are on the device of x; a slot's tensors anywhere.

    Nothing is checked when it is made: the native layer checks tensors in CPU memory, the methods those of a device.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    slots: Sequence[LoraSlot | None]
    token_slots: Tensor | None

    def check(self, shape: ExpertShape) -> None:
        """InvalidValueError: a shape, dtype or device, named with its value. Values are checked when they are read."""
        self.require("x", self.x, ACTIVATIONS, (-1, shape.hidden))
        tokens = self.x.shape[0]
        self.require("ids", self.ids, INDICES, (tokens, -1))
        self.require("weights", self.weights, (torch.float32,), (tokens, self.ids.shape[1]))
        if self.token_slots is not None:
            self.require("token_slots", self.token_slots, (torch.int32,), (tokens,))
        for index, slot in enumerate(self.slots):
            if slot is not None:
                _check_slot(slot, f"slots[{index}]", shape)

    def checks(self, num_experts: int, grad_out: Tensor | None = None) -> list[Check]:
        """The checks of values that `pairs.checked_ends` answers."""
        ids = self.ids.detach()
        made = [
            Check(
                "ids",
                ids,
                (ids < -1) | (ids >= num_experts),
                InvalidValueError,
                f"0 to {num_experts - 1}, or -1 for not routed",
            )
        ]
        if self.token_slots is not None:
            slots, count = self.token_slots, len(self.slots)
            allowed = "-1 for the base" + (f", or 0 to {count - 1}" if count else "")
            made.append(Check("token_slots", slots, (slots < -1) | (slots >= count), InvalidValueError, allowed))
        for name, tensor in (("x", self.x), ("weights", self.weights), ("grad_out", grad_out)):
            if tensor is not None:
                made.append(Check(name, tensor.detach(), ~torch.isfinite(tensor.detach()), NumericsError, ""))
        return made

    def require(self, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: tuple[int, ...]) -> None:
        """A size of -1 allows any."""
        if not isinstance(tensor, Tensor):
            raise InvalidValueError(f"{name} is a {type(tensor).__name__}, expected a torch.Tensor")
        if tensor.device != self.x.device:
            raise InvalidValueError(f"{name} is on {tensor.device}, x on {self.x.device}: they must be on one device")
        if tensor.dtype not in dtypes:
            allowed = " or ".join(_name(dtype) for dtype in dtypes)
            raise InvalidValueError(f"{name} has dtype {_name(tensor.dtype)}; allowed: {allowed}")
        _check_shape(name, tensor, shape)


def _check_slot(slot: LoraSlot, where: str, shape: ExpertShape) -> None:
    if not 0 <= slot.dropout < 1:
        raise InvalidValueError(f"{where}.dropout is {slot.dropout:g}, expected [0, 1)")
    sizes = ((shape.hidden, shape.intermediate),) * 2 + ((shape.intermediate, shape.hidden),)
    tensors, names = slot.tensors(), LORA_TENSORS
    for part, (columns, rows) in enumerate(sizes):
        a, b = tensors[2 * part], tensors[2 * part + 1]
        a_name, b_name = f"{where}.{names[2 * part]}", f"{where}.{names[2 * part + 1]}"
        if a is None and b is None:
            continue
        if a is None or b is None:
            raise InvalidValueError(f"{a_name if a is None else b_name} is missing: A and B come in pairs")
        for name, tensor in ((a_name, a), (b_name, b)):
            if tensor.dtype not in ACTIVATIONS:
                raise InvalidValueError(f"{name} has dtype {_name(tensor.dtype)}; allowed: float32 or bfloat16")
        _check_shape(a_name, a, (shape.num_experts, -1, columns))
        _check_shape(b_name, b, (shape.num_experts, rows, a.shape[1]))


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(want not in (-1, have) for have, want in zip(found, shape, strict=True)):
        expected = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise InvalidValueError(f"{name} has shape {list(found)}; expected [{expected}]")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
