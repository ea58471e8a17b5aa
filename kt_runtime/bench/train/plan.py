"""The parameters of the measured training on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kt_runtime.bench.options import PRESET, check_dtype, check_number
from kt_runtime.wire.messages import Activations

TARGETS = ("attention", "attention+experts")
ACTIVATIONS: tuple[Activations, ...] = ("retain", "recompute")
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Plan:
    """A step trains on `sequences` of `tokens` each, then runs AdamW.

    `micro_batch`: sequences in the peer's microbatch. `microbatch_tokens`: tokens in the server's microbatch.
    `model`: a preset that can be made, or a checkpoint's directory. `layers`: None: all of the model's. `dtype`,
    `peer_dtype`: None: the faster one on this machine. `warmup_steps` are not counted.
    """

    model: str = PRESET
    layers: int | None = None
    targets: tuple[str, ...] = TARGETS
    activations: tuple[Activations, ...] = ACTIVATIONS
    sequences: int = 8
    tokens: int = 256
    micro_batch: int = 1
    microbatch_tokens: int = 2048
    steps: int = 3
    warmup_steps: int = 2
    rank: int = 8
    alpha: float = 16.0
    dtype: str | None = None
    peer_dtype: str | None = None
    with_peer: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidValueError for a number below 1, UnknownNameError for an unknown name."""
        for name in ("sequences", "micro_batch", "microbatch_tokens", "steps", "rank"):
            check_number(name, getattr(self, name))
        check_number("tokens", self.tokens, 2, why="each token is to predict the next")
        if self.layers is not None:
            check_number("layers", self.layers)
        check_dtype(self.dtype)
        check_dtype(self.peer_dtype)

    @property
    def step_tokens(self) -> int:
        return self.sequences * self.tokens

    def micro_batches(self) -> list[tuple[int, int]]:
        """[first, end) of the sequences in each of the peer's microbatches."""
        starts = range(0, self.sequences, self.micro_batch)
        return [(start, min(start + self.micro_batch, self.sequences)) for start in starts]

    def facts(self, model: Path | str) -> dict[str, Any]:
        names = (
            "sequences",
            "tokens",
            "micro_batch",
            "microbatch_tokens",
            "steps",
            "warmup_steps",
            "rank",
            "alpha",
            "layers",
        )
        return {"model": str(model)} | {name: getattr(self, name) for name in names}


def sequences_of(plan: Plan, vocabulary: int) -> npt.NDArray[np.int64]:
    """[sequences, tokens]: random tokens, the same for both sides and in every step."""
    return np.random.default_rng(0).integers(3, vocabulary, (plan.sequences, plan.tokens))


def lora_targets(name: str) -> list[str]:
    """The server's target groups of a name such as `attention+experts`."""
    return name.split("+")
