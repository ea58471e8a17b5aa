"""Hot experts of one layer: some experts' weights are on the device too; their tokens are computed there.

    out = cpu part + device part

A pair (token, expert) is a *hit* if the expert has a slot, else a *miss*. The expert store computes the misses and
rounds their weighted sum once to x's dtype, as without slots. The device computes the hits, sums them in float32 in the
order of the token's expert ids, adds the sum to the cpu part in float32, and rounds once. So the same batch has equal
bits with equal placement; a token without hits has the store's own bits, and other placements differ by rounding.

The table expert -> slot exists twice: the host's copy decides what the store leaves out, the device's what is computed
there. It changes only between steps (`set.py`), first on the host, and on the device in the lane that computes hits, in
order with them. Staging copies the ids to the host anyway, so counting uses and leaving out hits add no
synchronization.

A token with an adapter on experts is computed by the store, with all of its experts: the store holds the LoRA products,
and such a token keeps the bits that training computes. The store also computes every call outside of a serving step
(training, the probe of a version), and calls with more than MOST_TOKENS tokens: their routing is nearly flat, and their
intermediates would need device memory.

Weights are held in the model's dtype, or packed as in the store (`slots.py`).

Shapes: T tokens, K experts per token, E experts, H hidden, I intermediate, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kt_runtime import device as devices
from kt_runtime.experts.gpu import staging
from kt_runtime.experts.gpu.call import ExpertCall
from kt_runtime.experts.gpu.hot.hits import hit_sum
from kt_runtime.experts.gpu.hot.lanes import Lane, Mark
from kt_runtime.experts.gpu.hot.placement import NONE
from kt_runtime.experts.gpu.hot.slots import PackedSlots, PlainSlots
from kt_runtime.experts.values import ExpertShape, LoraSlot

MOST_TOKENS = 256


@dataclass
class Step:
    """What the engine's thread is doing. `is_serving`: it computes a batch of requests, not training.

    `counted_tokens`: the batch decodes, and the expert ids of that many tokens are counted; further rows are padding.
    """

    is_serving: bool = False
    counted_tokens: int = 0


@dataclass
class Uses:
    """Counts of the pairs of decode steps. `hits`, `misses`: since the start; a pair with an adapter is a miss.

    `by_expert` [E]: pairs without an adapter, which may be hits, since the last `take`.
    """

    by_expert: NDArray[np.int64]
    hits: int = 0
    misses: int = 0

    def take(self) -> NDArray[np.int64]:
        taken, self.by_expert = self.by_expert, np.zeros_like(self.by_expert)
        return taken


class StoreLayer(Protocol):
    """An `ExpertLayer`, called with tensors in CPU memory."""

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        slots: Sequence[LoraSlot | None] = (),
        token_slots: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...


class HotExperts:
    """S slots of one layer. `lanes`: the one that computes hits, and the one that fills slots.

    `table` int32 [E]: expert -> slot or -1. The engine's thread makes all calls. `evict`, `fill` and `admit` may be
    called between two steps only.
    """

    def __init__(
        self,
        shape: ExpertShape,
        slots: PlainSlots | PackedSlots,
        lanes: tuple[Lane, Lane],
        step: Step,
    ) -> None:
        self.shape, self.slots, self.step = shape, slots, step
        self._compute, self._copies = lanes
        self.table = np.full(shape.num_experts, NONE, np.int32)
        self.uses = Uses(np.zeros(shape.num_experts, np.int64))
        with torch.inference_mode(False):  # a tensor made in inference mode could not be changed outside of it
            # The last entry is for ids without an expert: -1, and those that the store refuses.
            self._device_table = torch.full((shape.num_experts + 1,), NONE, dtype=torch.int32, device=slots.device)
        for lane in lanes:
            lane.follows_current()

    @property
    def num_slots(self) -> int:
        return self.slots.num_slots

    def takes(self, call: ExpertCall) -> bool:
        """Whether `forward` may compute and count this call; if not, the store computes, or refuses, all of it."""
        if not self.step.is_serving:
            return False
        x, ids, weights, token_slots = call.x, call.ids, call.weights, call.token_slots
        tokens = x.shape[0] if x.dim() == 2 else 0
        return (
            0 < tokens <= MOST_TOKENS
            and x.shape[1] == self.shape.hidden
            and x.dtype == self.slots.dtype
            and ids.dim() == 2
            and ids.shape == weights.shape
            and ids.shape[0] == tokens
            and ids.dtype in (torch.int32, torch.int64)
            and ids.device == weights.device == self.slots.device == x.device
            and (token_slots is None or (token_slots.shape == (tokens,) and token_slots.device == x.device))
            and (token_slots is not None or not call.slots)
        )

    @torch.no_grad()
    def forward(self, layer: Any, call: ExpertCall, out: Tensor | None = None) -> Tensor:
        """`ExpertLayer.forward`, for the layer of these experts and tensors of the device: [T, H] with x's dtype.

        Raises what the store's forward raises. A call that `takes` does not accept is staged for the store.
        """
        if not self.takes(call):
            return staging.forward(layer, call, out, retain=False)[0]
        if not (self.table != NONE).any():
            return self._compute_misses(layer, call, out)  # they are counted
        on_device = torch.empty(call.x.shape, dtype=torch.float32, device=call.x.device)
        self._compute.follows_current()
        try:
            with self._compute.on():
                slots = self._slots_of(call.ids, call.token_slots)
                hit_sum(call.x, slots, call.weights, self.slots, on_device)
            result = self._compute_misses(layer, call, out)
        finally:  # the caller's tensors, and ours, are free to be used again after this
            self._compute.precedes_current()
        result.copy_(on_device.add_(result))
        return result

    def _compute_misses(self, layer: StoreLayer, call: ExpertCall, out: Tensor | None) -> Tensor:
        part: Any = _StorePart(self, layer)  # staging asks for backward too, which is never called here
        if devices.is_host(call.x):
            return part.forward(call.x, call.ids, call.weights, slots=call.slots, token_slots=call.token_slots, out=out)
        return staging.forward(part, call, out, retain=False)[0]

    def _slots_of(self, ids: Tensor, token_slots: Tensor | None) -> Tensor:
        """int32 [T, K] on the device: the slot of each pair that is a hit, else -1."""
        last = self.shape.num_experts
        found = self._device_table[torch.where((ids >= 0) & (ids < last), ids, last).to(torch.int64)]
        return found if token_slots is None else torch.where((token_slots >= 0)[:, None], NONE, found)

    def hits(self, ids: NDArray[np.integer], token_slots: NDArray[np.integer] | None) -> NDArray[np.bool_]:
        """Which pairs are hits, [T, K] on the host: the same as of `_slots_of`."""
        last = self.shape.num_experts
        found = (ids >= 0) & (ids < last)
        found &= self.table[np.clip(ids, 0, last - 1)] != NONE
        return found if token_slots is None else found & (token_slots < 0)[:, None]

    def count(self, ids: NDArray[np.integer], token_slots: NDArray[np.integer] | None, num_hits: int) -> None:
        """Counts a decode step's pairs. ids [T, K]: all in range or -1, since the store has computed the call.

        token_slots [T].
        """
        self.uses.hits += num_hits
        self.uses.misses += int((ids >= 0).sum()) - num_hits
        may_hit = ids if token_slots is None else ids[token_slots < 0]
        self.uses.by_expert += np.bincount(may_hit[may_hit >= 0], minlength=self.shape.num_experts)

    # Between two steps.

    def evict(self, expert: int) -> None:
        """From the next step on the store computes `expert`."""
        self._set(expert, NONE)

    def fill(self, slot: int, buffer: Tensor) -> Mark:
        """Copies an expert from pinned memory of the host (`PlainSlots.carry`) into a slot that no expert has.

        Returns the mark after which the weights are there and the buffer may be written again. The copy begins
        when the steps that were queued before have read the slot.
        """
        assert slot not in self.table, f"slot {slot} is in use"
        self._copies.follows(self._compute.mark())
        with self._copies.on():
            self.slots.fill(slot, buffer)
        return self._copies.mark()

    def admit(self, expert: int, slot: int, filled: Mark) -> None:
        """From the next step on the device computes `expert`. `filled`: the mark of `fill`, which has passed."""
        assert self.table[expert] == NONE and slot not in self.table, f"expert {expert}, slot {slot}: {self.table}"
        assert filled.query(), f"the weights of expert {expert} have not arrived"
        self._compute.follows(filled)
        self._set(expert, slot)

    def _set(self, expert: int, slot: int) -> None:
        assert not self.step.is_serving, "the table changes between two steps only"
        with self._compute.on():  # after the steps that read the old table
            self._device_table[expert : expert + 1].fill_(slot)
        self.table[expert] = slot


class _StorePart:
    """The store's layer as staging calls it: hits are left out of the ids, and pairs are counted."""

    def __init__(self, hot: HotExperts, layer: StoreLayer) -> None:
        self._hot, self._layer = hot, layer

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
        chosen, of_token = ids.numpy(), None if token_slots is None else token_slots.numpy()
        hits = self._hot.hits(chosen, of_token)
        misses = torch.from_numpy(np.where(hits, np.asarray(NONE, chosen.dtype), chosen))
        result = self._layer.forward(x, misses, weights, slots=slots, token_slots=token_slots, out=out)
        if counted := self._hot.step.counted_tokens:
            of_token = None if of_token is None else of_token[:counted]
            self._hot.count(chosen[:counted], of_token, int(hits[:counted].sum()))
        return result
