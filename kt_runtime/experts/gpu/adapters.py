"""LoRA of experts on a device, for rows sorted by expert: forward, and the gradients of its input and of A and B.

All of it is float32, as on the CPU: A and B are training's float32 masters, and the products are a few hundredths of
the experts'. A row without the slot gets no product, not one with zeros: NaN in an adapter stays with its tokens.

R rows, L rank, `in` and `out` the sizes of a projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kt_runtime.experts.gpu.dropout import dropout_mask
from kt_runtime.experts.values import LORA_TENSORS, LoraSlot

GATE, UP, DOWN = range(3)


@dataclass(frozen=True)
class AdapterRows:
    """One adapter for the rows of a chunk of experts.

    `experts`: the model's number of each expert of the chunk. `ends`: their last rows, on the host. `chosen`: bool
    [R, 1], which rows have the adapter. `tokens`: int64 [R], the row's token in the call, for dropout.
    """

    slot: LoraSlot
    experts: Sequence[int]
    ends: Sequence[int]
    chosen: Tensor
    tokens: Tensor

    def has(self, projection: int) -> bool:
        return self.slot.tensors()[2 * projection] is not None

    def added(self, projection: int, x: Tensor, y: Tensor) -> None:
        """y [R, out] += scaling * B (A x) in place, x [R, in]; both float32."""
        if self.has(projection):
            x = self._dropped(projection, x)
            for rows, a, b in self._groups(projection):
                y[rows] += torch.where(self.chosen[rows], self._low(x[rows], a, rows) @ b.T, 0)

    def backward(
        self,
        projection: int,
        x: Tensor,
        by_y: Tensor,
        by_x: Tensor,
        into: LoraSlot | None,
        weight: Tensor | None = None,
    ) -> None:
        """by_x [R, in] += the gradient of x for by_y [R, out], both float32; the gradients of A and B are added to
        `into`, with by_y times `weight` [R, 1] if that is given."""
        if not self.has(projection):
            return
        mask = self._mask(projection, x.shape[1])
        for index, (rows, a, b) in enumerate(self._groups(projection)):
            dropped = x[rows] if mask is None else x[rows] * mask[rows]
            by_low = torch.where(self.chosen[rows], by_y[rows] @ b, 0) * self.slot.scaling
            by_dropped = torch.where(self.chosen[rows], by_low @ a, 0)
            by_x[rows] += by_dropped if mask is None else by_dropped * mask[rows]
            if into is not None:
                self._add_gradients(projection, index, dropped, by_y[rows], by_low, a, into, weight, rows)

    def _add_gradients(
        self,
        projection: int,
        index: int,
        dropped: Tensor,
        by_y: Tensor,
        by_low: Tensor,
        a: Tensor,
        into: LoraSlot,
        weight: Tensor | None,
        rows: slice,
    ) -> None:
        expert = self._live()[index]
        factor = 1.0 if weight is None else weight[rows]
        by_a, by_b = into.tensors()[2 * projection], into.tensors()[2 * projection + 1]
        assert by_a is not None and by_b is not None
        low = self._low(dropped, a, rows)
        by_a[expert] += ((by_low * factor).T @ dropped).to(by_a.device)
        by_b[expert] += ((by_y * factor).T @ low).to(by_b.device)

    def _low(self, x: Tensor, a: Tensor, rows: slice) -> Tensor:
        return torch.where(self.chosen[rows], x @ a.T, 0) * self.slot.scaling

    def _dropped(self, projection: int, x: Tensor) -> Tensor:
        mask = self._mask(projection, x.shape[1])
        return x if mask is None else x * mask

    def _mask(self, projection: int, columns: int) -> Tensor | None:
        if self.slot.dropout == 0:
            return None
        sizes = torch.tensor([end - begin for begin, end in zip((0, *self.ends[:-1]), self.ends, strict=True)])
        of_row = torch.repeat_interleave(torch.tensor(self.experts, dtype=torch.int64), sizes).to(self.tokens.device)
        return dropout_mask(self.slot.seed, self.slot.dropout, self.tokens, of_row, projection, columns)

    def _live(self) -> list[int]:
        """The model's numbers of the experts that have rows."""
        begins = (0, *self.ends[:-1])
        return [e for e, begin, end in zip(self.experts, begins, self.ends, strict=True) if end > begin]

    def _groups(self, projection: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """For each expert with rows: the rows, A [L, in] and B [out, L] in float32 on the rows' device."""
        a, b = self.slot.tensors()[2 * projection], self.slot.tensors()[2 * projection + 1]
        assert a is not None and b is not None, LORA_TENSORS[2 * projection]
        device = self.tokens.device
        for expert, begin, end in zip(self.experts, (0, *self.ends[:-1]), self.ends, strict=True):
            if end > begin:
                own_a, own_b = (t.detach()[expert].to(device, torch.float32) for t in (a, b))
                yield slice(begin, end), own_a, own_b


def adapter_rows(
    slots: Sequence[LoraSlot | None],
    token_slots: Tensor | None,
    tokens: Tensor,
    experts: Sequence[int],
    ends: Sequence[int],
) -> list[AdapterRows | None]:
    """Each slot's `AdapterRows`, for the rows `tokens` [R] of a chunk of `experts`. token_slots [T] int32, -1: none."""
    if token_slots is None:
        return [None] * len(slots)
    of_row = token_slots[tokens]
    return [
        None if slot is None else AdapterRows(slot, experts, ends, (of_row == index)[:, None], tokens)
        for index, slot in enumerate(slots)
    ]
