"""Experts that stream to the device in SGLang's scheduler process (`kt_runtime/experts/gpu`): `serve --stream-experts`.

SGLang 0.5.23 symbols and reasons:

- `ModelRunner.forward`: one batch of requests. A batch that decodes does not stream: it has few tokens.
- `ForwardMode.is_decode`: batches with one new token of each request.

The ring is allocated when the experts have been read (`store.py`), before SGLang sizes its pools. Training uses the
same ring: its calls go through the same layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kt_runtime import device
from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.experts import ExpertStore
from kt_runtime.experts.gpu import threshold
from kt_runtime.experts.gpu.paths import StreamedTokens, StreamingRule, attach_ring
from kt_runtime.experts.gpu.ring import ExpertRing
from kt_runtime.experts.gpu.sizes import ring_bytes, ring_chunk_experts
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.wire.status import ExpertStreaming

logger = logging.getLogger(__name__)

SYMBOLS = (
    "sglang.srt.model_executor.model_runner.ModelRunner.forward",
    "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_decode",
)
LARGEST_SHARE_OF_FREE_MEMORY = 4
"""The ring takes at most one part in so many of the device's free memory: the KV cache needs the rest."""

MOST_TOKENS = 4096
"""Most tokens of a call with which the threshold is measured."""


@dataclass(frozen=True)
class _Streaming:
    ring: ExpertRing
    rule: StreamingRule
    counts: StreamedTokens
    measured: bool


_streaming: _Streaming | None = None


def install(hooks: Hooks) -> None:
    """Hooks the processes of a server with a device, no others."""
    settings = ResidentSettings.from_environment()
    if settings is not None and settings.stream_experts != "off" and device.accelerator() is not None:
        hooks.around(SYMBOLS[0], step)


def attach(store: ExpertStore, dtype: torch.dtype, top_k: int, where: torch.device | None = None) -> None:
    """Lets calls of the store's layers stream. `dtype`: the model's. `top_k`: experts of a token. `where`: None for the
    process's accelerator.

    Does nothing with `--stream-experts off`, the second time, and for "auto" without a device or without memory for the
    ring. ConflictError, InvalidValueError: the same two for a given number of tokens.
    """
    global _streaming
    settings = ResidentSettings.from_environment()
    if settings is None or settings.stream_experts == "off" or _streaming is not None:
        return
    asked = None if settings.stream_experts == "auto" else settings.stream_experts
    where = where or _accelerator(asked)
    ring = None if where is None else _ring(store, where, asked, settings.ring_chunk_experts)
    if ring is None:
        return
    found = None if asked else threshold.measured(ring, next(iter(store.layers.values())), top_k, dtype, MOST_TOKENS)
    if found and not device.is_host(ring.device):
        torch.accelerator.empty_cache()  # SGLang sizes its pools by what is free now
    rule = StreamingRule(found.tokens if found else asked)
    counts = attach_ring([store.layers[index] for index in sorted(store.layers)], ring, rule)
    _streaming = _Streaming(ring, rule, counts, measured=found is not None)
    logger.info(
        "experts stream to %s from %s tokens on, %d at a time%s",
        ring.device,
        rule.threshold_tokens or "no number of",
        ring.chunk_experts,
        "" if found is None else f"; seconds of a layer, streamed and on the CPU: {_times(found)}",
    )


def detach() -> None:
    """Ends the loader thread and frees the ring; for tests that load several models in one process."""
    global _streaming
    if _streaming is not None:
        _streaming.ring.close()
    _streaming = None


def step(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """`ModelRunner.forward`. No call of a decode batch streams."""
    if _streaming is None:
        return original(runner, forward_batch, *args, **kwargs)
    rule = _streaming.rule
    rule.is_paused = forward_batch.forward_mode.is_decode()
    try:
        return original(runner, forward_batch, *args, **kwargs)
    finally:
        rule.is_paused = False


def status() -> ExpertStreaming | None:
    """Facts for `/kt/status`; None if no experts stream."""
    if _streaming is None:
        return None
    return ExpertStreaming(
        threshold_tokens=_streaming.rule.threshold_tokens,
        measured=_streaming.measured,
        chunk_experts=_streaming.ring.chunk_experts,
        ring_bytes=_streaming.ring.num_bytes,
        forward_tokens=_streaming.counts.forward,
        backward_tokens=_streaming.counts.backward,
    )


def _accelerator(asked: int | None) -> torch.device | None:
    kind = device.accelerator()
    if kind is not None:
        return torch.device(kind.type, torch.accelerator.current_device_index())
    if asked is not None:
        raise ConflictError(f"--stream-experts {asked}: this process has no device that experts could stream to")
    return None


def _ring(store: ExpertStore, where: torch.device, asked: int | None, planned: int) -> ExpertRing | None:
    """None if there is no memory for it, and no number of tokens was asked for. `planned`: experts of a chunk in the
    server's memory plan; 0: there was none."""
    if planned:
        return ExpertRing(where, store.shape, planned)
    room = None if device.is_host(where) else device.memory(where).free_bytes // LARGEST_SHARE_OF_FREE_MEMORY
    chunk = ring_chunk_experts(store.shape, room)
    if chunk:
        return ExpertRing(where, store.shape, chunk)
    reason = (
        f"a ring of experts takes {ring_bytes(store.shape, 1)} bytes at least, and {room} of the device may be used"
    )
    if asked is not None:
        raise InvalidValueError(f"--stream-experts {asked}: {reason}")
    logger.warning("experts do not stream to the device: %s", reason)
    return None


def _times(found: threshold.Crossover) -> str:
    return ", ".join(f"{one.tokens} tokens {one.streamed:.2g} and {one.cpu:.2g}" for one in found.timed)
