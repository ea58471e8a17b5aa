"""Arguments and result of a training call. N tokens of the call."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kt_runtime.resident.training.losses import LossFunction
from kt_runtime.resident.training.replay import CallRoutes
from kt_runtime.resident.twin.lora import LoraModules
from kt_runtime.resident.twin.model import Twin


@dataclass(frozen=True)
class Call:
    """The constants of one call. `adapter`: the key in `LoraModules`, None for the base alone.

    `backward` False: log-probabilities only, without dropout. `seed`: this call's dropout seed. `retain`: forward keeps
    the activations, so backward need not recompute them. `routes`: recorded experts of the call's tokens.
    """

    twin: Twin
    lora: LoraModules
    adapter: str | None
    loss: LossFunction
    backward: bool
    seed: int
    retain: bool = False
    routes: CallRoutes | None = None


@dataclass
class CallResult:
    """`logprobs` [N], float32, on the CPU. `gradient`: parameter name -> gradient, empty without backward.

    `metrics`, `num_correct`, `num_computed`: as in `wire.replies.ForwardReply`.
    """

    loss: float
    logprobs: torch.Tensor
    gradient: dict[str, torch.Tensor]
    metrics: dict[str, float] = field(default_factory=dict)
    num_correct: int = 0
    num_computed: int = 0
