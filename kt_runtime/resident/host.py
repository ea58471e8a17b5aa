"""The interface between the resident and the serving engine. `sglang_patch` implements it for SGLang, tests fake it.

This module does not import SGLang. The engine's thread makes all calls, between two batches, unless a method's
docstring states otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from kt_runtime.adapters import AdapterTensors
    from kt_runtime.experts import ExpertStore
    from kt_runtime.ranks import Exchange, HashingGroup
    from kt_runtime.resident.fingerprint import WeightsFingerprint
    from kt_runtime.resident.pacing.budget import Load
    from kt_runtime.resident.pacing.latencies import Latencies
    from kt_runtime.resident.routes.store import RouteStore
    from kt_runtime.wire.status import CacheTier, ExpertStreaming, GpuExperts, RankStatus


@dataclass
class Decoded:
    """Counts since the start. `step_batches`: batches of decoding requests that the native step has computed, with
    `step_tokens` tokens; `step_seconds`: time of its calls for them. `head_seconds`, `sampling_seconds`: time of the
    head, and of the engine's sampling, for all batches of decoding requests."""

    step_batches: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0
    head_seconds: float = 0.0
    sampling_seconds: float = 0.0


class Host(Protocol):
    engine_version: str
    model: str
    """The name or directory that the user gave."""
    model_directory: str
    config: dict[str, Any]
    """The Hugging Face config as in config.json."""
    device: torch.device
    dtype: torch.dtype
    num_ranks: int
    """Number of processes that run the same batches; rank 0's `decisions` are broadcast to all of them."""
    exchange: Exchange | None
    """The exchange of ranks, each of which has parts of the model's tensors and experts. None: this process has all."""
    hashing_group: HashingGroup | None
    """The group of the same ranks for messages of a thread other than the engine's. None with one rank."""
    max_lora_rank: int
    context_tokens: int
    chunked_prefill_tokens: int
    """Prompt tokens that serving computes at once, 0: no limit."""
    experts: ExpertStore
    weights: WeightsFingerprint
    """The fingerprint of all weights that this process's twin uses."""
    attends_in_float32: bool
    """Serving computes attention in float32 and, for DeepSeek, keeps MLA absorbed in prefill too; see `twin.attention`.
    """

    routes: RouteStore | None
    """Where the engine keeps the experts that its router chose for each token. None: it keeps none."""

    @property
    def step(self) -> str:
        """`running` if the native step computes the decoder stack, else why the engine's own modules do."""
        ...

    @property
    def step_exceptions(self) -> list[str]:
        """Why the engine's own modules have computed some batches although the step runs; each reason once."""
        ...

    @property
    def not_exact(self) -> str:
        """Why training's log-probabilities may differ from served ones; empty if they are equal to the bit."""
        ...

    @property
    def gpu_experts(self) -> GpuExperts | None:
        """Experts that serving computes on the device; training never does. None: there are none."""
        ...

    @property
    def expert_streaming(self) -> ExpertStreaming | None:
        """Experts that stream to the device, for prompts and for training. None: no call's do."""
        ...

    @property
    def decoded(self) -> Decoded:
        """Zeros if the engine does not run on a CPU."""
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The engine's parameters and buffers, by the engine's names. The twin's parameters are views of them."""
        ...

    def load(self) -> Load:
        """The engine's requests now. The same on every rank."""
        ...

    @property
    def latencies(self) -> Latencies:
        """Latencies of the latest finished requests."""
        ...

    def reserve_slot(self, num_bytes: int = 0) -> object | None:
        """A place among the adapters of the engine's batches, to fill before the first request. None: none is free.

        `num_bytes`: approximate size of the adapter in the engine's dtype, 0: not known. The engine may take the place
        back at any time. The adapter is then copied in its first batch.
        """
        ...

    def release_slot(self, slot: object) -> None:
        """Frees the result of `reserve_slot`, unless `install_adapter` has used it."""
        ...

    def prepare_adapter(self, name: str, adapter: AdapterTensors, slot: object | None = None) -> object:
        """The adapter in the engine's format, copied into `slot`. Called on worker threads. Tensors that have the
        engine's dtype already are not copied: nothing may change them from now on.

        Raises ConflictError if memory does not suffice, AdapterError if the engine does not support such an adapter.
        """
        ...

    def place_adapter(self, prepared: object, slot: object) -> object:
        """`prepared`, a result of `prepare_adapter` without a slot, copied into `slot` where that is quick. On the
        engine's thread: for small adapters."""
        ...

    def install_adapter(self, lora_id: str, name: str, version: str, prepared: object) -> None:
        """Makes `prepared`, a result of `prepare_adapter`, servable under `lora_id`, without a copy.

        `version`: the adapter's content hash. The engine reuses cached KV of earlier requests for equal content only.
        Raises ConflictError if there is no room for another adapter. An error changes nothing.
        """
        ...

    def drop_adapter(self, lora_id: str) -> None:
        """Frees an adapter that no request uses any longer. An unknown id is ignored."""
        ...

    def move_name(self, name: str, version: str, lora_id: str, done: Callable[[Exception | None], None]) -> None:
        """Asks the frontend to move `name` to `lora_id`; `done` is called in a later turn.

        The frontend drops the previous version (`DropAdapter`) when its last request has ended.
        """
        ...

    def settle_moves(self, seconds: float) -> None:
        """Waits up to `seconds` for an answer of the frontend, and calls `done` of the moves that it has answered."""
        ...

    def wakeups(self) -> list[Any]:
        """Descriptors or ZMQ sockets that the idle engine polls; readable when `poll` has work to do."""
        ...

    def poll(self) -> None:
        """Called once per turn on every rank; on rank 0 it calls `done` of every move that the frontend has
        answered."""
        ...

    def ranks(self) -> list[RankStatus]:
        """The present state of each rank's process; empty with one rank."""
        ...

    def cache_tiers(self) -> list[CacheTier]:
        """The current state of the prefix cache's tiers, nearest first."""
        ...

    def close(self) -> None:
        """Frees what the host holds. Called once, at the end."""
        ...
