"""Routing replay of a training call: finds the routes that the server has kept, and hands them to the twin's routers.

A sequence's routes are found by the tokens that the client sends and by the version that sampled them. Tokens that the
server has not computed, or whose routes were dropped by age, are routed as always.

Shapes: N tokens of the call, M layers with routed experts, K experts per token, T tokens of a microbatch with padding.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kt_runtime.resident.routes.keys import TokenKeys
from kt_runtime.resident.routes.store import Ids, RouteStore
from kt_runtime.resident.scheduler import Slice
from kt_runtime.resident.twin.batches import Microbatch, TrainingBatch
from kt_runtime.resident.twin.replay import LayerRoutes

SLICE_TOKENS = 4096
"""Hashing a token takes about a microsecond."""

Found = tuple[npt.NDArray[np.bool_], Ids]


@dataclass(frozen=True, eq=False)
class CallRoutes:
    """`known` [N], `ids` [N, M, K], undefined where not known. `forced`: the call computes with them."""

    known: npt.NDArray[np.bool_]
    ids: Ids
    forced: bool

    def metrics(self) -> dict[str, float]:
        """Numbers of tokens, but `routes/moved`, which the call's forward pass finds."""
        known = int(self.known.sum())
        return {
            "routes/replayed": float(known if self.forced else 0),
            "routes/missed": float(len(self.known) - known),
            "routes/moved": 0.0,
        }


class MicrobatchRoutes:
    """The part of a call's routes that belongs to one microbatch, in its order. `layers`: those with routed experts.

    `num_moved`: of the known tokens that the layers computed so far, those that the present router moves.
    """

    def __init__(self, routes: CallRoutes, microbatch: Microbatch, layers: Sequence[int]) -> None:
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._forced = routes.forced
        real, where = microbatch.real.cpu(), microbatch.where
        tokens = microbatch.tokens.numel()
        self._known = torch.zeros(tokens, dtype=torch.bool)
        self._known[real] = torch.from_numpy(routes.known)[where]
        self._ids = np.zeros((tokens, *routes.ids.shape[1:]), routes.ids.dtype)
        self._ids[real.numpy()] = routes.ids[where.numpy()]
        self._moved = torch.zeros(tokens, dtype=torch.bool)

    @property
    def num_moved(self) -> int:
        return int(self._moved.sum())

    def of_layer(self, layer: int) -> LayerRoutes | None:
        """None for a layer without routed experts."""
        place = self._places.get(layer)
        if place is None:
            return None
        ids = torch.from_numpy(self._ids[:, place].astype(np.int32))
        return LayerRoutes(ids, self._known, self._forced, self._moved)


def find_routes(
    store: RouteStore, versions: Sequence[str], batch: TrainingBatch, *, forced: bool
) -> Generator[Slice, None, CallRoutes]:
    """The kept routes of the call's tokens. `versions`: those that may have sampled them, preferred ones first.

    Each sequence takes the routes of one version, of the one that has computed most of it.
    """
    parts: list[Found] = []
    starts = np.cumsum([0, *batch.lengths])
    waiting = 0
    for start, length in zip(starts, batch.lengths, strict=False):
        waiting += length * len(versions)
        if waiting >= SLICE_TOKENS:
            yield Slice("routes", waiting)
            waiting = 0
        parts.append(_of_sequence(store, versions, batch.tokens[start : start + length]))
    known = np.concatenate([part[0] for part in parts])
    store.count(int(known.sum()), int((~known).sum()))
    return CallRoutes(known, np.concatenate([part[1] for part in parts]), forced)


def _of_sequence(store: RouteStore, versions: Sequence[str], tokens: npt.NDArray[np.int32]) -> Found:
    found: Found | None = None
    for version in versions:
        tried = store.find(TokenKeys(version).extend(tokens))
        if found is None or tried[0].sum() > found[0].sum():
            found = tried
        if found[0].all():
            break
    assert found is not None, "versions is not empty"
    return found
