"""How a batch becomes sequences, and that decode steps continue an extend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference.decoder import attention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kt_runtime.errors import InvalidValueError
from kt_runtime.sglang_patch.cpu.attention import create_backend, decode_sequences, extend_sequences, window_of

TABLE = torch.arange(100, 160, dtype=torch.int32).view(3, 20)  # request, position -> slot


def test_an_extend_reads_prefix_and_new_slots_of_each_request() -> None:
    batch = extend_sequences(TABLE, torch.tensor([2, 0]), [4, 0], [3, 5])
    assert batch.rows.tolist() == [[0, 3, 4, 2], [3, 5, 0, 0]]  # first query, queries, prefix, row of the table
    assert batch.slots is TABLE


def test_a_decode_batch_has_one_query_of_each_request() -> None:
    batch = decode_sequences(TABLE, torch.tensor([1, 0, 2]), torch.tensor([1, 20, 3]))
    assert batch.rows.tolist() == [[0, 1, 0, 1], [1, 1, 19, 0], [2, 1, 2, 2]]
    assert batch.slots is TABLE


@pytest.mark.parametrize("v_size", [16, 8])
def test_a_decode_step_continues_an_extend_bit_for_bit(v_size: int) -> None:
    """Through SGLang's interface: the new keys are stored in the pool's slots, and read there."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(13, heads, 16, generator=g).bfloat16() for heads in (4, 1, 1))
    whole = run_backend(q, k, v[..., :v_size], [(0, 13)])
    in_steps = run_backend(q, k, v[..., :v_size], [(0, 6), (6, 11), (11, 12), (12, 13)])
    assert whole.dtype == torch.bfloat16 and whole.shape == (13, 4 * v_size)
    assert torch.equal(in_steps, whole)


def test_a_cache_in_fp8_is_read_as_the_numbers_that_it_holds() -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(13, heads, 16, generator=g).bfloat16() for heads in (4, 2, 2))
    steps = [(0, 6), (6, 12), (12, 13)]
    rounded_k, rounded_v = (x.to(torch.float8_e4m3fn).bfloat16() for x in (k, v))
    assert not torch.equal(rounded_k, k)
    found = run_backend(q, k, v, steps, torch.float8_e4m3fn)
    assert found.dtype == torch.bfloat16 and torch.equal(found, run_backend(q, rounded_k, rounded_v, steps))


class Pool:
    """SGLang's KV pool of one layer. As there, fp8 lies in bytes."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> None:
        self.dtype, self.stored = dtype, torch.uint8 if dtype.itemsize == 1 else dtype
        self.keys = torch.zeros(200, *k.shape[1:], dtype=self.stored)
        self.values = torch.zeros(200, *v.shape[1:], dtype=self.stored)

    def set_kv_buffer(self, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys[location.loc] = k.to(self.dtype).view(self.stored)
        self.values[location.loc] = v.to(self.dtype).view(self.stored)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys.view(self.dtype)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values.view(self.dtype)


def run_backend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    steps: list[tuple[int, int]],
    kv_dtype: torch.dtype = torch.bfloat16,
    window_size: int = -1,
    **options: torch.Tensor,
) -> torch.Tensor:
    """Runs request 1 in steps of its positions: the last ones, of one token each, as decode steps."""
    runner = SimpleNamespace(
        sliding_window_size=None,
        attention_chunk_size=None,
        req_to_token_pool=SimpleNamespace(req_to_token=TABLE),
        token_to_kv_pool=Pool(k, v, kv_dtype),
    )
    backend = create_backend(runner)
    heads = q.shape[1]
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        qk_head_dim=q.shape[2],
        v_head_dim=v.shape[2],
        scaling=0.3,
        logit_cap=0.0,
        sliding_window_size=window_size,
    )
    found = []
    for start, stop in steps:
        mode = ForwardMode.DECODE if stop == start + 1 else ForwardMode.EXTEND
        batch = SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=torch.tensor([1]),
            seq_lens=torch.tensor([stop]),
            extend_prefix_lens_cpu=[start],
            extend_seq_lens_cpu=[stop - start],
            out_cache_loc=TABLE[1, start:stop].long(),
        )
        backend.init_forward_metadata(batch)
        own = slice(start, stop)
        found.append(backend.forward(q[own].reshape(stop - start, -1), k[own], v[own], layer, batch, **options))
    return torch.cat(found)


def test_windows_with_a_pool_of_their_own_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"sliding window of 127 have a KV pool of their own; .*hybrid-swa"):
        create_backend(SimpleNamespace(sliding_window_size=127, is_hybrid_swa=True))


@pytest.mark.parametrize(("size", "window"), [(None, 0), (-1, 0), (0, 1), (127, 128)])
def test_sglang_s_window_leaves_out_the_query_s_own_key(size: int | None, window: int) -> None:
    assert window_of(SimpleNamespace(sliding_window_size=size)) == window


def test_windows_and_sinks_reach_the_kernel() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(20, heads, 16, generator=generator) for heads in (4, 2, 2))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    found = run_backend(q, k, v, [(0, 12), (12, 19), (19, 20)], torch.float32, window_size=6, sinks=sinks)
    expected = attention(q.double(), k.double(), v.double(), 0.3, window=7, sinks=sinks).flatten(1)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)
