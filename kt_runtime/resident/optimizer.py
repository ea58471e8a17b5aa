"""AdamW (Loshchilov and Hutter, 2019) over one session's float32 masters, a few parameters at a time.

The arithmetic is PyTorch's own functional `adamw`, so that the steps equal `torch.optim.AdamW`'s to the last bit. What
is ours: the state's layout (named tensors that safetensors can hold), a step that can be cut into slices, and the
refusal of a gradient that is not finite before anything is changed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from kt_runtime.errors import NumericsError
from kt_runtime.resident.executor import Slice
from kt_runtime.resident.portions import portions

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


@dataclass(frozen=True)
class StepSettings:
    """`max_grad_norm` 0: no clipping. `lora_plus_ratio`: B's learning rate over A's (LoRA+, arXiv 2402.12354)."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    lora_plus_ratio: float = 1.0


class AdamW:
    """Moments for `parameters`, made when a parameter's first step comes. `step` counts finished steps."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.first: dict[str, torch.Tensor] = {}
        self.second: dict[str, torch.Tensor] = {}
        self.steps: dict[str, torch.Tensor] = {}

    def apply(self, gradient: dict[str, torch.Tensor], settings: StepSettings) -> Generator[Slice, None, None]:
        """One step over the parameters that `gradient` names, in slices. `gradient` is overwritten.

        A parameter that is not named keeps its value and its moments. The caller must run it to its end: a step is
        only whole once the generator is exhausted.
        """
        for upcoming, names in portions("optimizer step", gradient):
            yield upcoming
            self._update(names, gradient, settings)

    @torch.no_grad()
    def _update(self, names: list[str], gradient: Mapping[str, torch.Tensor], settings: StepSettings) -> None:
        for is_b in (False, True):
            chosen = [name for name in names if name.endswith(".lora_B") == is_b]
            if not chosen:
                continue
            for name in chosen:
                self._prepare(name)
            adamw(
                [self.parameters[name] for name in chosen],
                [gradient[name] for name in chosen],
                [self.first[name] for name in chosen],
                [self.second[name] for name in chosen],
                [],
                [self.steps[name] for name in chosen],
                foreach=False,
                fused=False,
                amsgrad=False,
                beta1=settings.beta1,
                beta2=settings.beta2,
                lr=settings.learning_rate * (settings.lora_plus_ratio if is_b else 1.0),
                weight_decay=settings.weight_decay,
                eps=settings.epsilon,
                maximize=False,
            )

    def _prepare(self, name: str) -> None:
        if name not in self.first:
            self.first[name] = torch.zeros_like(self.parameters[name], requires_grad=False)
            self.second[name] = torch.zeros_like(self.parameters[name], requires_grad=False)
            self.steps[name] = torch.zeros((), dtype=torch.float32)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state by name, as a file holds it."""
        kinds = {"first": self.first, "second": self.second, "steps": self.steps}
        return {f"{name}.{kind}": value for kind, state in kinds.items() for name, value in state.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes over copies of `tensors`, whose names and shapes the caller has checked."""
        self.first, self.second, self.steps = {}, {}, {}
        kinds = {"first": self.first, "second": self.second, "steps": self.steps}
        for key, value in tensors.items():
            name, _, kind = key.rpartition(".")
            device = torch.device("cpu") if kind == "steps" else self.parameters[name].device
            kinds[kind][name] = value.to(device, torch.float32, copy=True)


def clip(gradient: dict[str, torch.Tensor], max_norm: float) -> Generator[Slice, None, float]:
    """Scales `gradient` in place so that its global norm is at most `max_norm` (0: never); returns the norm before.

    The norm is the L2 norm over all tensors together, to the bit as `torch.nn.utils.get_total_norm` computes it. Raises
    NumericsError, with `gradient` as it was, when any element is NaN or infinite.
    """
    norms: list[torch.Tensor] = []
    for upcoming, names in portions("gradient norm", gradient):
        yield upcoming
        with torch.no_grad():
            norms += [torch.linalg.vector_norm(gradient[name]) for name in names]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if not torch.isfinite(norm):
        bad = [name for name, each in zip(sorted(gradient), norms, strict=True) if not torch.isfinite(each)]
        where = f"{bad[0]} and {len(bad) - 1} more" if bad else "none of them alone: their norm overflows"
        raise NumericsError(f"the gradient is not finite (norm {float(norm)}): {where}; no step was made")
    factor = torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0) if max_norm > 0 else torch.ones(())
    if factor < 1:
        for upcoming, names in portions("clipping", gradient):
            yield upcoming
            with torch.no_grad():
                for name in names:
                    gradient[name].mul_(factor.to(gradient[name].device))
    return float(norm)
