"""The attention backend `kt_cpu`: grouped-query and absorbed latent attention (MLA) on a CPU.

Symbols (SGLang 0.5.23): the backend is registered with `layers.attention.attention_registry.register_attention_backend`
and added to `ATTENTION_BACKEND_CHOICES`. `models.deepseek_common.attention_backend_handler.AttentionBackendRegistry`
selects absorbed MLA for DeepSeek with this backend. Reason: SGLang's `torch_native` recomputes the whole prefix for
every cached extend, one sequence at a time. It has no MLA handler, so DeepSeek would run its MHA path on the latent KV.

A batch is one call, decode or extend: the new queries of each sequence against its cached prefix and new keys. Keys
and values are read in SGLang's KV pool through `req_to_token` (`kt_runtime.experts.attention`). A token's result does
not depend on the other sequences, on how its prompt was cut, or on what was cached. Scores and softmax are float32.
A cache in fp8 (`--kv-cache-dtype fp8_e4m3`) is copied in the model's dtype, as much of it as the batch reads.

A sliding window hides a layer's older keys, which stay in the pool: the pool is one for all layers, as SGLang has it
with `--disable-hybrid-swa-memory` (`arguments.py`). Sinks (gpt-oss) take part in the softmax. Layers with `use_irope`
(Llama 4) attend within chunks of `attention_chunk_size` positions (`kt_runtime.experts.attention.in_chunks`); SGLang
has no such backend for CPUs. `topk_indices` (DeepSeek-V3.2) are the keys that an indexer chose for each query
(`models/sparse_attention.py`).

Not supported: cross attention and bidirectional attention. No served model family has them.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts.attention import Sequences, attend, in_chunks, paged
from kt_runtime.experts.dense import DTYPES
from kt_runtime.sglang_patch.faults import finite_rows
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.options import ATTENTION_BACKEND

SYMBOLS = (
    "sglang.srt.arg_groups.choices.ATTENTION_BACKEND_CHOICES",
    "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
    "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends",
    "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.register",
)


def install(hooks: Hooks) -> None:
    if not hooks.on_cpu:
        return
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(ATTENTION_BACKEND)
    hooks.before("sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends", _register_backend)


def _register_backend(*args: Any, **kwargs: Any) -> None:
    """Called late, because both registries import SGLang's kernels and models."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    register_attention_backend(ATTENTION_BACKEND)(create_backend)
    AttentionBackendRegistry.register(ATTENTION_BACKEND, lambda attention, batch: AttnForwardMethod.MLA)


def create_backend(runner: Any) -> Any:
    """The backend for SGLang's model runner. Raises InvalidValueError for a model whose sliding windows have a pool of
    their own."""
    # SGLang takes Llama 4's chunks for a window here; none of its layers has one.
    if getattr(runner, "is_hybrid_swa", False) and not _has_chunks(runner):
        raise InvalidValueError(
            f"attention backend {ATTENTION_BACKEND!r}: the model's layers with a sliding window of "
            f"{runner.sliding_window_size} have a KV pool of their own; start SGLang with --disable-hybrid-swa-memory"
        )
    return _backend_class()(runner)


def _has_chunks(runner: Any) -> bool:
    chunk = getattr(runner, "attention_chunk_size", None)
    return bool(chunk) and runner.sliding_window_size == chunk


def decode_sequences(req_to_token: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor) -> Sequences:
    """One new query each; `lengths` [B] include it."""
    return paged(req_to_token, requests, lengths - 1, torch.ones_like(lengths))


def extend_sequences(
    req_to_token: torch.Tensor, requests: torch.Tensor, prefix_lens: list[int], extend_lens: list[int]
) -> Sequences:
    return paged(req_to_token, requests, torch.tensor(prefix_lens), torch.tensor(extend_lens))


def window_of(layer: Any) -> int:
    """Keys that a query of a `RadixAttention` sees at most; 0: all. SGLang's size leaves out the query's own key."""
    size = layer.sliding_window_size
    return 0 if size is None or size < 0 else int(size) + 1


def widened(
    keys: torch.Tensor, values: torch.Tensor, sequences: Sequences, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, Sequences]:
    """The rows that the sequences read, copied in `dtype` one sequence after another, and the sequences over them."""
    assert sequences.slots is not None
    lengths, places = sequences.rows[:, 1:3].sum(1), sequences.rows[:, 3].tolist()
    own = [sequences.slots[place, :length] for place, length in zip(places, lengths.tolist(), strict=True)]
    slots = torch.cat(own).long()
    rows = torch.cat([sequences.rows[:, :3], (lengths.cumsum(0) - lengths)[:, None]], dim=1)
    return keys[slots].to(dtype), values[slots].to(dtype), Sequences(rows, None)


def _backend_class() -> type:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class CpuAttentionBackend(AttentionBackend):
        """Reads and writes SGLang's token pools. Its only state is the plan of the current batch."""

        def __init__(self, runner: Any) -> None:
            super().__init__()
            self.req_to_token_pool = runner.req_to_token_pool
            self.token_to_kv_pool = runner.token_to_kv_pool
            self.chunk = runner.attention_chunk_size or 0
            self.forward_metadata: Any = None
            self._in_chunks: tuple[Sequences, Sequences] | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            mode, table = forward_batch.forward_mode, self.req_to_token_pool.req_to_token
            requests = forward_batch.req_pool_indices
            if mode.is_idle():
                self.forward_metadata = None
            elif mode.is_decode():
                self.forward_metadata = decode_sequences(table, requests, forward_batch.seq_lens)
            else:
                prefix, new = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
                self.forward_metadata = extend_sequences(table, requests, list(map(int, prefix)), list(map(int, new)))

        def forward_extend(
            self,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            sinks: torch.Tensor | None = None,
            topk_indices: torch.Tensor | None = None,
        ) -> torch.Tensor:
            keys, values = self._store(k, v, layer, forward_batch, save_kv_cache)
            heads, sequences = layer.tp_q_head_num, self._sequences(layer)
            if keys.dtype not in DTYPES:
                keys, values, sequences = widened(keys, values, sequences, q.dtype)
            queries = q.reshape(-1, heads, layer.qk_head_dim)
            sinks = None if sinks is None else sinks.detach().float()
            window = window_of(layer)
            scaling, cap, chosen = layer.scaling, layer.logit_cap, topk_indices
            out = attend(queries, keys, values, sequences, scaling, cap, sinks=sinks, window=window, chosen=chosen)
            return out.view(-1, heads * layer.v_head_dim)

        forward_decode = forward_extend

        def _sequences(self, layer: Any) -> Sequences:
            whole: Sequences = self.forward_metadata
            if not self.chunk or not layer.use_irope:
                return whole
            if self._in_chunks is None or self._in_chunks[0] is not whole:
                self._in_chunks = whole, in_chunks(whole, self.chunk)
            return self._in_chunks[1]

        def support_triton(self) -> bool:
            return False

        def _store(
            self, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Writes the new keys and values, then returns the pool's buffers: [slots, K, D] and [slots, K, V]."""
            from sglang.srt.mem_cache.memory_pool import KVWriteLoc

            notes = finite_rows.present()
            if notes is not None and notes.has_adapters and k is not None:
                k, v = finite_rows.masked(k), v if v is None else finite_rows.masked(v)
            if save and k is not None:
                self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
            pool = self.token_to_kv_pool
            return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)

    return CpuAttentionBackend
