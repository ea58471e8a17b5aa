"""AdamW (Loshchilov and Hutter, 2019) over one session's float32 masters, a few parameters at a time.

PyTorch's functional `adamw` does the arithmetic, so the steps are bit-identical to `torch.optim.AdamW`'s. This module
adds the state's layout (named tensors for safetensors), steps that are cut into slices, and a check that raises for a
non-finite gradient before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from kt_runtime.errors import InvalidValueError, NumericsError
from kt_runtime.resident.scheduler import Slice
from kt_runtime.resident.training.portions import freed, portions

LARGEST_NORM = 1e18  # its square is a second moment
LARGEST = 1e37  # float32 ends at 3.4e38
PIECE_ELEMENTS = 1 << 20
"""Elements of a parameter that one thread updates at a time."""
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


class _Piece(NamedTuple):
    """A parameter or a part of one. `step`: the number of earlier steps, float32; `update` increments it."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    step: torch.Tensor
    is_b: bool

    @torch.no_grad()
    def update(self, settings: StepSettings) -> None:
        adamw(
            [self.parameter],
            [self.gradient],
            [self.first],
            [self.second],
            [],
            [self.step],
            foreach=False,
            fused=False,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=settings.learning_rate * (settings.lora_plus_ratio if self.is_b else 1.0),
            weight_decay=settings.weight_decay,
            eps=settings.epsilon,
            maximize=False,
        )


class AdamW:
    """Moments for `parameters`, allocated at a parameter's first step. `steps` counts each parameter's steps.

    `changed` is called with the names of parameters that a slice has updated. `threads`: for parameters in host memory.
    They share a slice by pieces, each computed by one thread: OpenMP's threads would wait for each other after each of
    the dozen operations, and would gain nothing at a few GB/s per core.

    `over_ranks`: returns, for each number, the largest on any rank; each rank has a part of the parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        changed: Callable[[list[str]], None] = lambda names: None,
        threads: ThreadPoolExecutor | None = None,
        over_ranks: Callable[[Sequence[float]], Sequence[float]] = lambda values: values,
    ) -> None:
        self.parameters, self._changed, self._threads = parameters, changed, threads
        self._over_ranks = over_ranks
        self.first: dict[str, torch.Tensor] = {}
        self.second: dict[str, torch.Tensor] = {}
        self.steps: dict[str, torch.Tensor] = {}
        self._largest: tuple[float, float] | None = None  # bounds of |parameter| and |first moment|; None: not known

    def check_range(self, norm: float, settings: StepSettings) -> Generator[Slice, None, None]:
        """Raises InvalidValueError if a step with a gradient of this norm could overflow float32.

        A step that has changed some masters can't be undone, so this check runs before. It uses an upper bound that
        costs nothing. The bound grows with each step, but stays far below the range with useful settings; if the bound
        gets too large, the tensors are measured again.
        """
        for is_measured in (False, True):
            if self._largest is None or is_measured:
                self._largest = yield from self._measured()
            parameter, first = self._largest
            first = max(first, norm)
            rate = settings.learning_rate * max(1.0, settings.lora_plus_ratio)
            scaled = rate * first / (1 - settings.beta1)  # no step's bias correction is smaller
            update = scaled / min(1.0, settings.epsilon)
            decayed = parameter * max(1.0, abs(1 - rate * settings.weight_decay))
            if decayed + update < LARGEST:
                self._largest = (decayed + update, first)
                return
        raise InvalidValueError(
            f"learning_rate {settings.learning_rate:g} with epsilon {settings.epsilon:g}, beta1 {settings.beta1:g} and "
            f"weight_decay {settings.weight_decay:g}, a gradient of norm {norm:g} and parameters up to {parameter:g}: "
            "the step could leave float32's range; no step was made"
        )

    def _measured(self) -> Generator[Slice, None, tuple[float, float]]:
        largest = [0.0, 0.0]
        for index, tensors in enumerate((self.parameters, self.first)):
            for upcoming, names in portions("range", tensors):
                yield upcoming
                with torch.no_grad():
                    found = [float(torch.linalg.vector_norm(tensors[name], float("inf"))) for name in names]
                largest[index] = max(largest[index], *found)
        parameter, first = self._over_ranks(largest)
        return parameter, first

    def apply(self, gradient: dict[str, torch.Tensor], settings: StepSettings) -> Generator[Slice, None, None]:
        """One step over the parameters in `gradient`, in slices. Each slice removes its entries from `gradient`.

        Other parameters keep their values and moments. The caller must exhaust the generator: only then is the step
        complete.
        """
        for upcoming, names in portions("optimizer step", gradient):
            yield upcoming
            self._update(names, gradient, settings)
            self._changed(names)
            for name in names:
                del gradient[name]

    @torch.no_grad()
    def _update(self, names: list[str], gradient: Mapping[str, torch.Tensor], settings: StepSettings) -> None:
        pieces = [piece for name in names for piece in self._pieces(name, gradient[name])]
        if self._threads is None:
            for piece in pieces:
                piece.update(settings)
        else:
            list(self._threads.map(lambda piece: piece.update(settings), pieces))
        for name in names:
            self.steps[name] += 1

    def _pieces(self, name: str, gradient: torch.Tensor) -> list[_Piece]:
        self._prepare(name)
        tensors = self.parameters[name].detach(), gradient, self.first[name], self.second[name]
        is_b, step = name.endswith(".lora_B"), self.steps[name]
        if self._threads is None or not all(tensor.is_contiguous() for tensor in tensors):
            return [_Piece(*tensors, step.clone(), is_b)]
        p, g, m, v = (tensor.view(-1).split(PIECE_ELEMENTS) for tensor in tensors)
        return [_Piece(*part, step.clone(), is_b) for part in zip(p, g, m, v, strict=True)]

    def _prepare(self, name: str) -> None:
        if name not in self.first:
            self.first[name] = torch.zeros_like(self.parameters[name], requires_grad=False)
            self.second[name] = torch.zeros_like(self.parameters[name], requires_grad=False)
            self.steps[name] = torch.zeros((), dtype=torch.float32)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state as NAME.first, NAME.second, NAME.steps, as in a checkpoint."""
        kinds = {"first": self.first, "second": self.second, "steps": self.steps}
        return {f"{name}.{kind}": value for kind, state in kinds.items() for name, value in state.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> Generator[Slice, None, None]:
        """Takes ownership of `tensors`, without a copy: float32 on the parameters' device (steps on the CPU).

        The caller checks names and shapes. Allowed also after the parameters were changed.
        """
        for state in (self.first, self.second, self.steps):
            yield from freed(state)
        self._largest = None
        kinds = {"first": self.first, "second": self.second, "steps": self.steps}
        for key, value in tensors.items():
            name, _, kind = key.rpartition(".")
            kinds[kind][name] = value


def _norm_of(name: str, gradient: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient)


def clip(
    gradient: dict[str, torch.Tensor],
    max_norm: float,
    norm_of: Callable[[str, torch.Tensor], torch.Tensor] = _norm_of,
) -> Generator[Slice, None, float]:
    """Scales `gradient` in place to a global norm of at most `max_norm` (0: no clipping); returns the norm before.

    The norm is the L2 norm over all tensors together, bit-identical to `torch.nn.utils.get_total_norm`. Raises
    NumericsError, and leaves `gradient` unchanged, if an element is NaN or infinite or the norm is not below
    `LARGEST_NORM`. `norm_of`: gives one gradient's norm, from its name and the gradient.
    """
    norms: list[torch.Tensor] = []
    for upcoming, names in portions("gradient norm", gradient):
        yield upcoming
        with torch.no_grad():
            norms += [norm_of(name, gradient[name]) for name in names]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if not float(norm) < LARGEST_NORM:
        bad = [name for name, each in zip(sorted(gradient), norms, strict=True) if not torch.isfinite(each)]
        where = (
            f"{bad[0]} and {len(bad) - 1} more" if bad else f"none of them alone: their norm is above {LARGEST_NORM:g}"
        )
        raise NumericsError(f"the gradient is not finite (norm {float(norm)}): {where}; no step was made")
    factor = torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0) if max_norm > 0 else torch.ones(())
    if factor < 1:
        for upcoming, names in portions("clipping", gradient):
            yield upcoming
            with torch.no_grad():
                for name in names:
                    gradient[name].mul_(factor.to(gradient[name].device))
    return float(norm)
