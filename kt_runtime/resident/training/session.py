"""A training session: one adapter's float32 masters, its accumulated gradient and its optimizer.

The methods that compute are generators of slices. A call changes the session only at its end, when its gradient is
added. A step must run to its end, since moments and masters change together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kt_runtime import device
from kt_runtime.adapters import AdapterTensors
from kt_runtime.adapters.tensors import thread_pool
from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.families import LoraModule
from kt_runtime.resident.routes.keys import BASE
from kt_runtime.resident.scheduler import Slices, run_at_once
from kt_runtime.resident.training.call import Call, CallResult
from kt_runtime.resident.training.copies import MasterCopies
from kt_runtime.resident.training.losses import LossFunction, WeightedCrossEntropy
from kt_runtime.resident.training.optimizer import AdamW, StepSettings, clip
from kt_runtime.resident.training.policy import PolicyLossFunction
from kt_runtime.resident.training.portions import freed, portions
from kt_runtime.resident.training.preference import PreferenceLossFunction
from kt_runtime.resident.training.replay import CallRoutes
from kt_runtime.resident.training.session_limits import FROZEN_BYTES, TRAINED_BYTES, num_parameters
from kt_runtime.resident.training.slices import training_call
from kt_runtime.resident.twin.adapter_parts import AdapterParts
from kt_runtime.resident.twin.batches import TrainingBatch, split
from kt_runtime.resident.twin.lora import LoraModules
from kt_runtime.resident.twin.model import Twin
from kt_runtime.wire import Samples
from kt_runtime.wire.messages import Activations, CrossEntropy, LoraSettings, Loss, Model, PreferenceLoss
from kt_runtime.wire.status import SessionInfo

MOST_SAMPLERS = 8
"""Published versions among which a call's routes are looked for."""

Reference = npt.NDArray[np.float32] | None
"""[sequences of a call]: the reference's log-probabilities, summed over each sequence's counted targets."""


@dataclass(frozen=True)
class SessionId:
    """`key` is unique. `name` is the client's name of the session; a later session may reuse it."""

    key: str
    name: str


class Session:
    """`key`: the adapter's key in `LoraModules`. `step`, `num_calls`: finished optimizer steps and gradient calls.

    `num_bytes`: the memory that the session may use. `opened_at`, `used_at`: time.monotonic() of its creation, and of
    the start of its latest request.
    """

    def __init__(
        self,
        name: str,
        key: str,
        twin: Twin,
        lora: LoraModules,
        modules: Sequence[LoraModule],
        settings: LoraSettings,
        parameters: dict[str, torch.nn.Parameter],
    ) -> None:
        """`parameters`: the result of `lora.create` for `key`; of several ranks this one's parts (`AdapterParts`)."""
        self.name, self.key, self.settings, self.modules = name, key, settings, list(modules)
        self.id = SessionId(key, name)
        self._twin, self._lora, self.parameters = twin, lora, parameters
        self.parts = AdapterParts(self.modules, twin.exchange)
        self._adapter_of: dict[Model, str | None] = {"policy": key, "base": None, "reference": None}
        self.gradient: dict[str, torch.Tensor] = {}
        on_host = all(device.is_host(each.device) for each in parameters.values())
        self._threads = thread_pool("kt-masters") if on_host else None
        masters_bytes = 4 * sum(each.numel() for each in parameters.values())
        # The engine waits for the optimizer's threads, and for no copy. Of several ranks none has whole masters.
        self._copying = thread_pool("kt-copies", masters_bytes) if on_host and twin.exchange is None else None
        self.copies = MasterCopies(self.parameters, self._copying)
        self.optimizer = AdamW(self.parameters, self.copies.stepped, self._threads, self.parts.largest)
        self.step = 0
        self.num_calls = 0
        self.num_bytes = TRAINED_BYTES * num_parameters(modules, settings.rank)
        self.opened_at = self.used_at = time.monotonic()
        self._published: deque[str] = deque(maxlen=MOST_SAMPLERS)

    def info(self) -> SessionInfo:
        return SessionInfo(
            session=self.name,
            rank=self.settings.rank,
            alpha=self.settings.alpha,
            step=self.step,
            modules=[module.name for module in self.modules],
            num_parameters=num_parameters(self.modules, self.settings.rank),
            num_bytes=self.num_bytes,
            idle_s=max(0.0, time.monotonic() - self.used_at),
            age_s=max(0.0, time.monotonic() - self.opened_at),
        )

    def note_published(self, version: str) -> None:
        """A version with this content hash, of the session's masters, is served now."""
        if version in self._published:
            self._published.remove(version)
        self._published.appendleft(version)

    @property
    def samplers(self) -> list[str]:
        """Versions that may have sampled what the session trains on, newest first: its published ones, or the base."""
        return list(self._published) or [BASE]

    def add_reference(self, adapter: AdapterTensors, model_modules: Sequence[LoraModule]) -> Slices:
        """Makes the model "reference" the base with `adapter`, which must not change. Call at most once per session."""
        key = f"{self.key}_reference"
        yield from self._lora.create_frozen(key, adapter, model_modules)
        self.num_bytes += FROZEN_BYTES * sum(pair.a.numel() + pair.b.numel() for pair in adapter.modules.values())
        self._adapter_of["reference"] = key

    def forward(
        self,
        batch: TrainingBatch,
        loss: Loss,
        max_tokens: int,
        *,
        model: Model = "policy",
        reference: Reference = None,
        samples: Samples | None = None,
        routes: CallRoutes | None = None,
    ) -> Slices:
        """Log-probabilities without dropout; nothing changes. Returns a `CallResult`."""
        function = _function(loss, reference, samples)
        return (yield from self._call(batch, function, max_tokens, self._adapter_of[model], routes=routes))

    def forward_backward(
        self,
        batch: TrainingBatch,
        loss: Loss,
        max_tokens: int,
        *,
        reference: Reference = None,
        samples: Samples | None = None,
        activations: Activations = "recompute",
        routes: CallRoutes | None = None,
    ) -> Slices:
        """Accumulates the loss's gradient; an error leaves the accumulated one unchanged. Returns a `CallResult`."""
        function = _function(loss, reference, samples)
        result: CallResult = yield from self._call(
            batch, function, max_tokens, self.key, backward=True, activations=activations, routes=routes
        )
        both = result.gradient.keys() & self.gradient.keys()
        for upcoming, names in portions("sum of gradients", result.gradient, both):
            yield upcoming
            with torch.no_grad():
                for name in names:
                    result.gradient[name] += self.gradient[name]
        self.gradient |= result.gradient
        self.num_calls += 1
        return result

    def optim_step(self, settings: StepSettings) -> Slices:
        """One AdamW step over the accumulated gradient, which is cleared in any case. Returns the norm before clipping.

        Raises ConflictError without a gradient, NumericsError for a non-finite gradient, and InvalidValueError for
        settings with which the step could overflow float32. After an error, the masters are unchanged.
        """
        gradient, self.gradient = self.gradient, {}
        if not gradient:
            raise ConflictError(
                f"session {self.name!r}: no gradient since the last step; send forward_backward before optim_step"
            )
        norm: float = yield from clip(gradient, settings.max_grad_norm, self.parts.norm)
        try:
            clipped = min(norm, settings.max_grad_norm) if settings.max_grad_norm > 0 else norm
            yield from self.optimizer.check_range(clipped, settings)
        except InvalidValueError as error:
            raise InvalidValueError(f"session {self.name!r}, optim_step {self.step + 1}: {error}") from None
        self.copies.step_begins()
        yield from self.optimizer.apply(gradient, settings)
        self.step += 1
        return norm

    def close(self) -> None:
        """As `closing`, without pauses between slices."""
        run_at_once(self.closing())

    def closing(self) -> Slices:
        """Frees masters, reference, gradient and moments."""
        self.copies.close()
        for threads in (self._threads, self._copying):
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)
        for key in filter(None, self._adapter_of.values()):
            yield from self._lora.removal(key)
        optimizer, self.optimizer = self.optimizer, AdamW({})
        for tensors in (self.gradient, optimizer.first, optimizer.second):
            yield from freed(tensors)
        yield from freed(self.parameters)

    def restore(
        self, masters: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor], step: int, num_calls: int
    ) -> Slices:
        """Copies `masters`, takes ownership of `moments` (named as in `AdamW.tensors`) and clears the gradient.

        Both are of this rank's parts. The caller checks names and shapes.
        """
        for upcoming, names in portions("copy", masters):
            yield upcoming
            with torch.no_grad():
                for name in names:
                    self.parameters[name].copy_(masters[name])
            self.copies.replaced(names)
        yield from self.optimizer.restore(moments)
        yield from freed(self.gradient)
        self.step, self.num_calls = step, num_calls

    def _call(
        self,
        batch: TrainingBatch,
        loss: LossFunction,
        max_tokens: int,
        adapter: str | None,
        *,
        backward: bool = False,
        activations: Activations = "recompute",
        routes: CallRoutes | None = None,
    ) -> Slices:
        seed = hash_seed(self.settings.seed, self.num_calls)
        call = Call(self._twin, self._lora, adapter, loss, backward, seed, activations == "retain", routes)
        microbatches = split(batch, max_tokens, self._twin.device, pairs=loss.is_paired)
        return (yield from training_call(call, microbatches, len(batch.tokens)))


def _function(loss: Loss, reference: Reference, samples: Samples | None) -> LossFunction:
    if isinstance(loss, CrossEntropy):
        return WeightedCrossEntropy()
    if isinstance(loss, PreferenceLoss):
        return PreferenceLossFunction(loss, reference)
    assert samples is not None
    return PolicyLossFunction(loss, samples)


def hash_seed(seed: int, num_calls: int) -> int:
    """The dropout seed of one call: the same after a session was saved and restored."""
    return (seed << 32) ^ num_calls
