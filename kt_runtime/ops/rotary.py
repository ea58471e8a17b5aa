"""Rotary embedding (Su et al. 2021, arXiv:2104.09864) of queries and keys, and its gradient.

On a CPU kt-runtime's kernel rotates, for serving (the native step) and training alike. Every product and sum is rounded
to the dtype of x, as in SGLang's and Hugging Face's modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kt_runtime.experts import dense


@dataclass(frozen=True)
class Rotary:
    """The rotation of queries and keys of B sequences of S tokens.

    `angles` [P, R]: cosines, then sines of each position, in the dtype of what is rotated. `places` [B, S] int64: the
    tokens' positions. `interleaved`: pairs are adjacent elements, else elements R / 2 apart.

    `kept`: what layers that share an indexer keep for one another, by layer and sequence, as long as the rotation of
    their microbatch lives; the first of its sequences is number `first_row` of those of `kept`.
    """

    angles: torch.Tensor
    places: torch.Tensor
    interleaved: bool
    kept: dict[tuple[int, int], Any] = field(default_factory=dict, compare=False, repr=False)
    first_row: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, N, D] -> [B, S, N, D]; of a head, the elements from R on do not change."""
        return _Rotated.apply(x, self)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        ctx.rotary = rotary
        return _rotate(x, rotary, inverse=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _rotate(grads[0], ctx.rotary, inverse=True), None


def _rotate(x: torch.Tensor, rotary: Rotary, inverse: bool) -> torch.Tensor:
    places = rotary.places.expand(x.shape[:2]).flatten()
    rotated = dense.rotate(x.flatten(0, 1), rotary.angles, places, rotary.interleaved, inverse=inverse)
    return rotated.view(x.shape)
