"""Keeps the experts that the router chose for each served token, for training's routing replay (`resident.routes`).

Symbol (SGLang 0.5.23): after `Scheduler.run_batch` the experts of the batch's tokens go to the store. The other symbols
are only read. The native step writes them while it computes (`cpu/step.py`), and so do the experts of SGLang's modules
(`cpu/moe.py`). Reason: SGLang's own capturer (`--enable-return-routed-experts`) sees its modules only, and answers each
request with its routes. Here they stay where training looks for them.

Routes are found by version and tokens, not by KV slots: a prefix that comes from the cache, from whichever tier, has
the routes that were kept when it was computed. A server without `--routing-replay` is not hooked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kt_runtime.families import family_for
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.resident.routes.keys import TokenKeys
from kt_runtime.resident.routes.store import RouteStore
from kt_runtime.sglang_patch.cache import keys as cache_keys
from kt_runtime.sglang_patch.hooks import Hooks

logger = logging.getLogger(__name__)

SYMBOLS = (
    "sglang.srt.managers.scheduler.Scheduler.run_batch",
    "sglang.srt.managers.schedule_batch.Req.origin_input_ids",
    "sglang.srt.managers.schedule_batch.Req.output_ids",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.extend_lens",
)
UNKNOWN = -1  # the expert of a layer that has not noted any


@dataclass(frozen=True, eq=False)
class _Batch:
    """T tokens: their ids and positions [T], and their experts `routes` [M, T, K] int32."""

    tokens: torch.Tensor
    positions: torch.Tensor
    routes: torch.Tensor


_store: RouteStore | None = None  # of the process's only model
_places: dict[int, int] = {}  # of the layers with routed experts
_batch: _Batch | None = None  # that is being computed, or was computed last


def install(hooks: Hooks) -> None:
    settings = ResidentSettings.from_environment()
    if hooks.on_cpu and settings is not None and settings.route_bytes:
        hooks.after(SYMBOLS[0], _keep)


def open_store(config: Mapping[str, Any], size_bytes: int) -> RouteStore | None:
    """Begins to keep routes; 0 bytes: none are kept. `config`: the model's config.json."""
    global _store, _batch
    _store, _batch = None, None
    _places.clear()
    if size_bytes:
        family = family_for(config)
        _places.update({layer: place for place, layer in enumerate(family.moe_layers(config))})
        num_experts = family.expert_shape(config)[0]
        _store = RouteStore(len(_places), family.num_experts_per_tok(config), num_experts, size_bytes)
        logger.info("routes of up to %d tokens are kept for routing replay", _store.capacity_tokens)
    return _store


def begin(tokens: torch.Tensor, positions: torch.Tensor) -> None:
    """A batch is about to be computed. `tokens`, `positions`: [T]."""
    global _batch
    if _store is None:
        return
    shape = (_store.num_layers, len(tokens), _store.top_k)
    _batch = _Batch(tokens, positions, torch.full(shape, UNKNOWN, dtype=torch.int32))


def rows() -> torch.Tensor | None:
    """[M, T, K] int32, which takes the experts of the present batch; None: they are not recorded."""
    return None if _batch is None else _batch.routes


def note(layer: int, ids: torch.Tensor) -> None:
    """The experts [T, K] of one layer of the present batch, if they are recorded."""
    if _batch is not None and ids.shape == _batch.routes.shape[1:]:
        _batch.routes[_places[layer]] = ids


def _keep(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    global _batch
    computed, _batch = _batch, None
    if _store is None or computed is None:
        return
    lengths = [1] * len(batch.reqs) if batch.forward_mode.is_decode() else [int(size) for size in batch.extend_lens]
    if len(lengths) != len(batch.reqs) or sum(lengths) != len(computed.tokens):
        return
    tokens, starts = computed.tokens.tolist(), computed.positions.tolist()
    keys: list[bytes] = []
    wanted: list[int] = []
    end = 0
    for req, length in zip(batch.reqs, lengths, strict=True):
        first, end = end, end + length
        sequence = _keys_of(req, starts[first]) if length else None
        if sequence is not None:
            keys += sequence.extend(tokens[first:end])
            wanted += range(first, end)
    routes = computed.routes[:, wanted].transpose(0, 1).numpy()
    whole = np.flatnonzero((routes >= 0).all(axis=(1, 2)))
    _store.put([keys[index] for index in whole], routes[whole])


def _keys_of(req: Any, start: int) -> TokenKeys | None:
    """The keys of the request's sequence, of its first `start` tokens so far. None: its tokens do not say what was
    computed."""
    keys: TokenKeys | None = getattr(req, "kt_token_keys", None)
    if keys is None or keys.length != start:
        version = cache_keys.version_of(req.lora_id)
        if version is None or req.input_embeds is not None:
            return None
        keys = req.kt_token_keys = TokenKeys(version)
        if start:  # from the prefix cache, or computed before the request was retracted
            assert _store is not None
            _store.renew(keys.extend([*req.origin_input_ids, *req.output_ids][:start]))
    return keys if keys.length == start else None
