"""Scaled dot-product attention for training: its forward pass is serving's on a CPU, bit for bit.

B sequences, T queries, L keys, N query heads, G query heads per key head, K key heads, D key size, V value size.
Scores, softmax and sums are float32. Absorbed MLA is the case K = 1.

`kt_runtime.experts.attention` computes the forward pass, as in serving (`sglang_patch.cpu.attention`). PyTorch computes
gradients, which have no counterpart in serving. There grouped-query attention does not repeat keys: the G queries of a
key head become rows of one matrix product. Queries are processed in blocks. A block's scores fit the processor's caches
where possible, never exceed `SCORE_BUDGET` elements, and cover only the keys that the block may see. Queries are scaled
before the product, since there are fewer queries than scores. This module does not import SGLang.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kt_runtime.experts import attention

SCORE_BUDGET = 1 << 23  # elements in one block of scores: 32 MiB
CACHED_SCORES = 1 << 19  # elements of scores that fit the processor's caches
FEWEST_QUERIES = 64  # per block, where the budget allows: every block reads all keys and values once
BLOCK_UNITS = (64, 16, 4)  # a block is a multiple of the first that fits: BLAS sums 64 and 128 keys alike, not 109


def attend_batch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    logit_cap: float = 0.0,
    log_sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [B, T, N, D], k [B, L, K, D], v [B, L, K, V] -> float32 [B, T, N, V], on a CPU.

    Query t sees keys 0 to L - T + t. A `logit_cap` above 0 caps scores softly: cap * tanh(score / cap). `log_sums`
    [B, T, N], float32, is an optional output: log of the sum over keys of exp(score).
    """
    batch, tokens = q.shape[:2]
    if k.shape[1] < tokens:
        raise AssertionError(f"{k.shape[1]} keys, but {tokens} queries")
    rows = None if log_sums is None else log_sums.view(-1, q.shape[2])
    out = attention.attend(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        attention.contiguous(batch, tokens, k.shape[1]),
        scaling,
        logit_cap,
        out_dtype=torch.float32,
        log_sums=rows,
    )
    return out.unflatten(0, (batch, tokens))


def attend_batch_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attend_sequence_backward` of B sequences: each tensor has a leading batch dimension.

    `out` [B, T, N, V] and `log_sums` [B, T, N] are the results of `attend_batch`. On a CPU, if keys and values have
    one size and no key is cached, one call of PyTorch's fused kernel computes everything, in float32 too, but with its
    own summation order. That kernel gives each thread whole key heads, so it runs only if there are enough key heads.
    """
    is_fused = q.device.type == "cpu" and k.shape == v.shape and k.shape[1] == q.shape[1]
    if not is_fused or len(q) * k.shape[2] < torch.get_num_threads():
        rows = zip(grad_out, q, k, v, strict=True)
        by_q, by_k, by_v = zip(*(attend_sequence_backward(*row, scaling) for row in rows), strict=True)
        return torch.stack(by_q), torch.stack(by_k), torch.stack(by_v)
    wide = (x.float().transpose(1, 2) for x in (grad_out, q, k, v, out))
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *wide, log_sums.transpose(1, 2).contiguous(), 0.0, True, scale=scaling
    )
    by_q, by_k, by_v = (by_x.transpose(1, 2).to(x.dtype) for by_x, x in zip(found, (q, k, v), strict=True))
    return by_q, by_k, by_v


def attend_sequence_backward(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `attend_batch` for one sequence's q [T, N, D], k [L, K, D], v [L, K, V]; grad_out [T, N, V].

    They have the tensors' dtypes. The prefix is the keys before the last T. Scores are recomputed block by block; sums
    are float32.
    """
    tokens, heads, _ = q.shape
    prefix_tokens = k.shape[0] - tokens
    k_heads, v_heads = k.float().transpose(0, 1), v.float().transpose(0, 1)
    by_q, by_k, by_v = torch.empty_like(q), torch.zeros_like(k_heads), torch.zeros_like(v_heads)
    for start, stop in _blocks(prefix_tokens, tokens, heads * k.shape[0]):
        visible = prefix_tokens + stop
        keys, values = k_heads[:, :visible], v_heads[:, :visible]
        queries, grads = (
            _rows(q[start:stop].float() * scaling, len(keys)),
            _rows(grad_out[start:stop].float(), len(keys)),
        )
        weights = torch.softmax(_scores(queries, keys, stop - start), dim=-1)
        by_v[:, :visible].baddbmm_(weights.transpose(1, 2), grads)
        by_scores = torch.bmm(grads, values.transpose(1, 2))
        mean = torch.linalg.vecdot(by_scores, weights).unsqueeze(-1)
        by_scores.sub_(mean).mul_(weights)
        by_q[start:stop] = _tokens(torch.bmm(by_scores, keys).mul_(scaling), stop - start)
        by_k[:, :visible].baddbmm_(by_scores.transpose(1, 2), queries)
    return by_q, by_k.transpose(0, 1).to(k.dtype), by_v.transpose(0, 1).to(v.dtype)


def _blocks(prefix_tokens: int, tokens: int, scores_of_one: int) -> list[tuple[int, int]]:
    """[start, stop) of the blocks of queries. `scores_of_one`: the largest number of scores of one query.

    Blocks end at multiples of the block size, counted from the start of the sequence, prefix included.
    """
    block = max(FEWEST_QUERIES, CACHED_SCORES // scores_of_one)
    block = max(1, min(block, SCORE_BUDGET // scores_of_one))
    block -= block % next((unit for unit in BLOCK_UNITS if unit <= block), 1)
    first = min(block - prefix_tokens % block, tokens)
    starts = [0, *range(first, tokens, block)]
    return list(zip(starts, [*starts[1:], tokens], strict=True))


def _scores(rows: torch.Tensor, k: torch.Tensor, tokens: int) -> torch.Tensor:
    """rows [K, G * T, D], k [K, L, D] -> [K, G * T, L]. The last query sees all L keys, the one before L - 1."""
    k_heads, keys, _ = k.shape
    scores = torch.bmm(rows, k.transpose(1, 2))
    if tokens > 1:
        scores.view(k_heads, -1, tokens, keys)[..., keys - tokens :].add_(_hidden_future(tokens, rows.device))
    return scores


@lru_cache(maxsize=16)
def _hidden_future(tokens: int, device: torch.device) -> torch.Tensor:
    """[T, T]: the causal mask, added to scores: -inf for keys after the query's own, else 0."""
    return torch.full((tokens, tokens), float("-inf"), device=device).triu_(1)


def _rows(x: torch.Tensor, k_heads: int) -> torch.Tensor:
    """[T, N, D] -> [K, G * T, D]."""
    tokens, heads, size = x.shape
    return x.view(tokens, k_heads, heads // k_heads, size).permute(1, 2, 0, 3).reshape(k_heads, -1, size)


def _tokens(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """[K, G * T, V] -> [T, N, V]."""
    k_heads, _, size = rows.shape
    return rows.view(k_heads, -1, tokens, size).permute(2, 0, 1, 3).reshape(tokens, -1, size)
