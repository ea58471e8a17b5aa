"""Routing replay in the twin: a router takes recorded experts instead of those it would choose now.

Only the choice is replayed. The weights are computed from the present logits at the recorded ids, and gradients reach
the logits through them: rollout routing replay, R3 (arXiv 2510.11370).

Shapes: T tokens of a microbatch, padding included, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class LayerRoutes:
    """Routes of one layer. `ids` [T, K]: integers, valid where `known` [T]. `forced`: known tokens get them; else they
    are only compared. `moved` [T]: becomes True where a known token's present experts are others."""

    ids: torch.Tensor
    known: torch.Tensor
    forced: bool
    moved: torch.Tensor

    def part(self, first: int, count: int) -> LayerRoutes:
        """The routes of `count` tokens from `first` on."""
        tokens = slice(first, first + count)
        return LayerRoutes(self.ids[tokens], self.known[tokens], self.forced, self.moved[tokens])

    def instead_of(self, chosen: torch.Tensor) -> torch.Tensor | None:
        """The ids [T, K] to compute with instead of the present router's `chosen`; None: those. Updates `moved`."""
        recorded = self.ids.to(chosen.dtype)
        differ = (recorded.sort(-1).values != chosen.sort(-1).values).any(-1)
        self.moved.logical_or_(differ & self.known)
        return torch.where(self.known[:, None], recorded, chosen) if self.forced else None
