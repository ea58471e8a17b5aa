"""What the resident needs of the engine that serves the model. SGLang implements it; tests use a fake.

Nothing here knows SGLang. All calls come from the engine's own thread, between two of its batches, except where a
method says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from kt_runtime.adapters import AdapterTensors
    from kt_runtime.experts import ExpertStore
    from kt_runtime.resident.fingerprint import WeightsFingerprint
    from kt_runtime.wire.messages import CacheTier


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
    """How many processes run the same batches; `decisions` of rank 0 are broadcast to all."""
    max_lora_rank: int
    context_tokens: int
    chunked_prefill_tokens: int
    """Prompt tokens that serving computes at once, 0: no limit."""
    experts: ExpertStore
    weights: WeightsFingerprint
    """Of all that the twin computes with."""
    attends_in_float32: bool
    """Whether serving attends in float32 and, in DeepSeek, over the latent (absorbed) in prefill too; see `attention`.
    """

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The engine's parameters and buffers by the engine's names. The twin takes views of them."""
        ...

    def is_serving(self) -> bool:
        """True while any request is running or waiting."""
        ...

    def prepare_adapter(self, name: str, adapter: AdapterTensors) -> object:
        """The adapter in the engine's form, with tensors of its own. Called by threads beside the engine's.

        Raises ConflictError when memory does not suffice, AdapterError when the engine can't hold such an adapter.
        """
        ...

    def install_adapter(self, lora_id: str, name: str, version: str, prepared: object) -> None:
        """Makes what `prepare_adapter` made servable under `lora_id`, without copying it.

        `version`: its content hash. What the engine keeps of earlier requests is used again for the same content only.
        Raises ConflictError when there is no room for another adapter. Nothing is changed on an error.
        """
        ...

    def drop_adapter(self, lora_id: str) -> None:
        """Frees an adapter that no request uses any more. An unknown id is ignored."""
        ...

    def move_name(self, name: str, version: str, lora_id: str, done: Callable[[Exception | None], None]) -> None:
        """Asks the frontend to let `name` mean `lora_id` from now on; `done` is called in a later turn.

        The frontend drops the former version (`DropAdapter`) once the last request that uses it has ended.
        """
        ...

    def wakeups(self) -> list[Any]:
        """Descriptors or ZMQ sockets that poll readable when `poll` has something to do: the engine sleeps on them."""
        ...

    def poll(self) -> None:
        """Called once per turn on rank 0: the moment to call `done` of the moves that the frontend has answered."""
        ...

    def cache_tiers(self) -> list[CacheTier]:
        """The prefix cache's tiers as they are now, nearest first."""
        ...

    def close(self) -> None:
        """Called once, at the end."""
        ...
