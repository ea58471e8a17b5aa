"""Hot experts in SGLang's scheduler process (`kt_runtime/experts/gpu/hot`): `serve --gpu-experts`.

SGLang 0.5.23 symbols and reasons:

- `ModelRunner.forward`: one batch of requests, which may hit; whatever runs outside, as training does, may not. The
  batch's mode says whether its expert ids are counted. A graph runner pads the batch inside, so the tokens are counted
  here.
- `ForwardMode.is_decode`: batches with one new token of each request.
- `Scheduler.ingest_requests`: called once per turn of the loop; the metrics are published here.

The slots are allocated when the experts have been read (`store.py`), before SGLang sizes its pools. Experts move in
`resident/turns.py`, between two batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from kt_runtime import device
from kt_runtime.errors import ConflictError
from kt_runtime.experts import ExpertStore
from kt_runtime.experts.gpu.hot.set import HotSet
from kt_runtime.experts.gpu.hot.slots import chosen_form
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.sglang_patch.gpu.hot_metrics import PublishedHot
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.wire.status import GpuExperts

logger = logging.getLogger(__name__)

SYMBOLS = (
    "sglang.srt.model_executor.model_runner.ModelRunner.forward",
    "sglang.srt.managers.scheduler.Scheduler.ingest_requests",
    "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_decode",
)
PUBLISH_SECONDS = 1.0

_hot: HotSet | None = None
_published: PublishedHot | None = None
_next_publication_s = 0.0


def install(hooks: Hooks) -> None:
    """Hooks the processes of a server with hot experts, no others."""
    settings = ResidentSettings.from_environment()
    if settings is None or not settings.gpu_expert_bytes:
        return
    hooks.around(SYMBOLS[0], step)
    hooks.after(SYMBOLS[1], _publish_periodically)


def attach(store: ExpertStore, dtype: torch.dtype, where: torch.device | None = None) -> None:
    """Gives the store's layers their slots, and copies the pinned experts. `dtype`: the model's. `where`: None for the
    process's accelerator.

    Does nothing without `--gpu-experts`, or when it is called again. Raises ConflictError for a process without a
    device, and the errors of `HotSet`.
    """
    global _hot
    settings = ResidentSettings.from_environment()
    if settings is None or not settings.gpu_expert_bytes or _hot is not None:
        return
    where = where or _accelerator()
    form = chosen_form(settings.gpu_expert_format, {index: layer.format for index, layer in store.layers.items()})
    size_bytes, pins = settings.gpu_expert_bytes, settings.pinned_experts
    _hot = HotSet(store.layers, store.shape, dtype, where, size_bytes, pins, form=form)
    _hot.settle()
    _hot.attach()
    for one in _hot.use().layers:
        text = "hot experts: layer %d has %d slots of %d bytes on %s, in %s"
        logger.info(text, one.layer, one.slots, one.slot_bytes, where, one.format)


def _accelerator() -> torch.device:
    kind = device.accelerator()
    if kind is None:
        raise ConflictError("--gpu-experts: this process has no device that could keep experts")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def detach() -> None:
    """Forgets the slots; for tests that load several models in one process."""
    global _hot, _published, _next_publication_s
    _hot, _published, _next_publication_s = None, None, 0.0


def step(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """`ModelRunner.forward` within a step of the hot experts."""
    if _hot is None:
        return original(runner, forward_batch, *args, **kwargs)
    decodes = forward_batch.forward_mode.is_decode()
    with _hot.step(decoded_tokens=forward_batch.input_ids.shape[0] if decodes else 0):
        return original(runner, forward_batch, *args, **kwargs)


def turn() -> None:
    """Called once per turn of the scheduler's loop, between two batches."""
    if _hot is not None:
        _hot.turn()


def has_work() -> bool:
    """Whether an expert is being copied to the device: the scheduler must not sleep then."""
    return _hot is not None and _hot.is_moving()


def not_exact() -> str:
    """Why hot experts keep training's log-probabilities from equalling served ones; empty without hot experts."""
    return "" if _hot is None else "experts on the device round in other places than the store (--gpu-experts)"


def status() -> GpuExperts | None:
    """Facts for `/kt/status`; None without hot experts."""
    if _hot is None:
        return None
    use = _hot.use()
    hits, misses = (sum(getattr(layer, name) for layer in use.layers) for name in ("hits", "misses"))
    return GpuExperts(
        size_bytes=use.size_bytes,
        slot_bytes=max(layer.slot_bytes for layer in use.layers),
        slots=sum(layer.slots for layer in use.layers),
        pinned=use.pinned,
        resident={layer.layer: layer.resident for layer in use.layers},
        decode_steps=use.decode_steps,
        hits=hits,
        misses=misses,
        hit_rate=hits / max(1, hits + misses),
        moves=use.moves,
        moved_bytes=use.moved_bytes,
        form=use.form,
        scratch_bytes=use.scratch_bytes,
        formats={layer.layer: layer.format for layer in use.layers},
        slots_by_layer={layer.layer: layer.slots for layer in use.layers},
    )


def _publish_periodically(_result: Any, *_args: Any, **_kwargs: Any) -> None:
    global _published, _next_publication_s
    now_s = time.monotonic()
    if _hot is None or now_s < _next_publication_s:
        return
    _next_publication_s = now_s + PUBLISH_SECONDS
    if _published is None:
        _published = PublishedHot()
    _published.publish(_hot.use())
