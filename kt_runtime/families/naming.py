"""A family's tensors have two names: transformers' own, by which kt-runtime knows them, and those of its checkpoints.

Both are the same for most families. Mixtral's `block_sparse_moe.experts.3.w1.weight` is one whose names differ:
transformers 5 calls it `mlp.experts.3.gate_proj.weight` (and fuses it). A checkpoint may have either.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = "{}"


@dataclass(frozen=True, slots=True)
class Renaming:
    """A part of a tensor's name: `stored` in checkpoints, `ours` in transformers. `{}` stands for the same number."""

    stored: str
    ours: str

    def to_ours(self, name: str) -> str:
        return _replaced(name, self.stored, self.ours)

    def to_stored(self, name: str) -> str:
        return _replaced(name, self.ours, self.stored)


def to_ours(renamings: Sequence[Renaming], name: str) -> str:
    for renaming in renamings:
        name = renaming.to_ours(name)
    return name


def to_stored(renamings: Sequence[Renaming], name: str) -> str:
    for renaming in renamings:
        name = renaming.to_stored(name)
    return name


def _replaced(name: str, old: str, new: str) -> str:
    if NUMBER not in old:
        return name.replace(old, new)
    pattern = re.escape(old).replace(re.escape(NUMBER), r"(\d+)")
    return re.sub(pattern, lambda found: new.replace(NUMBER, found[1]), name)
