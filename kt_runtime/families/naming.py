"""A family's tensors have two names: transformers' own, by which kt-runtime knows them, and those of its checkpoints.

Both are the same for most families. Mixtral's `block_sparse_moe.experts.3.w1.weight` is one whose names differ:
transformers 5 calls it `mlp.experts.3.gate_proj.weight` (and fuses it). A checkpoint may have either.

The language model inside a model of several inputs (`wrapped.py`) has `language_model.` before its names: in published
checkpoints `language_model.model.layers`, in NVIDIA's `language_model.layers`, in what transformers 5 writes
`model.language_model.layers`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = "{}"
WRAPPER = "language_model."
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Renaming:
    """A part of a tensor's name: `stored` in checkpoints, `ours` in transformers. `{}` stands for the same number."""

    stored: str
    ours: str

    def to_ours(self, name: str) -> str:
        return _replaced(name, self.stored, self.ours)

    def to_stored(self, name: str) -> str:
        return _replaced(name, self.ours, self.stored)


def without_wrapper(name: str) -> str:
    """The name without `language_model.`, as the language model alone has it; PEFT's prefix stays."""
    before, wrapper, inside = name.partition(WRAPPER)
    if not wrapper or before.removeprefix(_PEFT_PREFIX) not in ("", "model."):
        return name
    inside = inside.removeprefix("model.")
    prefix = _PEFT_PREFIX if before.startswith(_PEFT_PREFIX) else ""
    return f"{prefix}{inside}" if inside.startswith("lm_head.") else f"{prefix}model.{inside}"


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
