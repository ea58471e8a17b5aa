"""Scaled dot-product attention of one sequence's new queries over its cached keys, and of a batch of single queries.

T queries, L keys, N query heads, G query heads per key head, K key heads, D key size, V value size. Everything is
computed in float32, whatever the cache's dtype is: the scores, the softmax and the sums. Grouped-query attention keeps
keys as they are: the G queries of a key head become rows of one matrix product. Absorbed MLA is the case K = 1.

Queries are taken in blocks, whose scores stay in the caches where they can and never need more than `SCORE_BUDGET`
numbers, and a block looks only at the keys that it may see. Serving on a CPU (`sglang_patch.attention`) and the twin
use the same functions. The order in which BLAS adds depends on the number of keys, so blocks end at the same keys of a
sequence however much of it is cached: what is left are float32's last bits. Queries are multiplied with the scaling
before the product: there are fewer of them than scores. Knows nothing of SGLang.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kt_runtime.ops.matmul import product

SCORE_BUDGET = 1 << 23  # numbers in one block of scores: 32 MiB
CACHED_SCORES = 1 << 19  # as many stay in the caches
FEWEST_QUERIES = 64  # in a block, where the budget allows: keys and values are read once for each
BLOCK_UNITS = (64, 16, 4)  # a block is a multiple of the first it holds: BLAS adds alike for 64 and 128 keys, not 109


def attend_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix_tokens: int,
    scaling: float,
    logit_cap: float = 0.0,
    log_sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, N, D], k [L, K, D], v [L, K, V] with L = prefix_tokens + T -> float32 [T, N, V].

    Query t sees keys 0 to prefix_tokens + t. A `logit_cap` above 0 caps scores softly: cap * tanh(score / cap).
    `log_sums` [T, N], float32, is filled where given: log of the sum over keys of exp(score).
    """
    tokens, heads, _ = q.shape
    keys = k.shape[0]
    if keys != prefix_tokens + tokens:
        raise AssertionError(f"{keys} keys, but prefix {prefix_tokens} + {tokens} queries")
    out = torch.empty(tokens, heads, v.shape[-1], dtype=torch.float32, device=q.device)
    k_heads, v_heads = k.float().transpose(0, 1), v.float().transpose(0, 1)
    for start, stop in _blocks(prefix_tokens, tokens, heads * keys):
        visible = prefix_tokens + stop
        rows, keys_seen = _rows(q[start:stop].float() * scaling, len(k_heads)), k_heads[:, :visible]
        scores = _scores(rows, keys_seen, stop - start, logit_cap)
        weights = torch.softmax(scores, dim=-1)
        out[start:stop] = _tokens(product(weights, v_heads[:, :visible]), stop - start)
        if log_sums is not None:
            # The largest weight is exp(largest score) / sum.
            sums = scores.amax(-1, keepdim=True).sub_(weights.amax(-1, keepdim=True).log_())
            log_sums[start:stop] = _tokens(sums, stop - start)[..., 0]
    return out


def attend_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scaling: float, logit_cap: float = 0.0
) -> torch.Tensor:
    """q [B, N, D], k [B, L, K, D], v [B, L, K, V], lengths [B] -> float32 [B, N, V].

    Keys from lengths[b] on are padding.
    """
    batch, heads, size = q.shape
    length, k_heads = k.shape[1], k.shape[2]
    grouped = (q.float() * scaling).view(batch, k_heads, heads // k_heads, size)
    scores = product(grouped, k.float().permute(0, 2, 3, 1))  # [B, K, G, L]
    scores = _cap(scores, logit_cap)
    padding = torch.arange(length, device=q.device) >= lengths[:, None]
    scores.masked_fill_(padding[:, None, None, :], float("-inf"))
    out = product(torch.softmax(scores, dim=-1), v.float().transpose(1, 2))
    return out.reshape(batch, heads, v.shape[-1])


def attend_batch_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attend_sequence_backward` of B sequences, each tensor with one more dimension in front.

    `out` [B, T, N, V] and `log_sums` [B, T, N] are what `attend_sequence` gave. Where keys and values have one size and
    none is cached, a CPU takes one call of PyTorch's fused kernel, in float32 too, with its own order of summing: that
    gives a thread whole key heads, so only where there are enough of them.
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
    """Gradients by q [T, N, D], k [L, K, D] and v [L, K, V] of `attend_sequence`, in their dtypes; grad_out [T, N, V].

    The prefix is the keys before the last T. Scores are computed again, block by block; sums are float32.
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
        weights = torch.softmax(_scores(queries, keys, stop - start, 0.0), dim=-1)
        by_v[:, :visible].baddbmm_(weights.transpose(1, 2), grads)
        by_scores = torch.bmm(grads, values.transpose(1, 2))
        mean = torch.linalg.vecdot(by_scores, weights).unsqueeze(-1)
        by_scores.sub_(mean).mul_(weights)
        by_q[start:stop] = _tokens(torch.bmm(by_scores, keys).mul_(scaling), stop - start)
        by_k[:, :visible].baddbmm_(by_scores.transpose(1, 2), queries)
    return by_q, by_k.transpose(0, 1).to(k.dtype), by_v.transpose(0, 1).to(v.dtype)


def _blocks(prefix_tokens: int, tokens: int, scores_of_one: int) -> list[tuple[int, int]]:
    """[start, stop) of the blocks of queries; `scores_of_one`: what one query needs at most.

    They end where the sequence, prefix included, has a multiple of a block, however much of it is prefix.
    """
    block = max(FEWEST_QUERIES, CACHED_SCORES // scores_of_one)
    block = max(1, min(block, SCORE_BUDGET // scores_of_one))
    block -= block % next((unit for unit in BLOCK_UNITS if unit <= block), 1)
    first = min(block - prefix_tokens % block, tokens)
    starts = [0, *range(first, tokens, block)]
    return list(zip(starts, [*starts[1:], tokens], strict=True))


def _scores(rows: torch.Tensor, k: torch.Tensor, tokens: int, logit_cap: float) -> torch.Tensor:
    """rows [K, G * T, D], k [K, L, D] -> [K, G * T, L]; the last query sees all keys, each before it one key fewer."""
    k_heads, keys, _ = k.shape
    scores = _cap(product(rows, k.transpose(1, 2)), logit_cap)
    if tokens > 1:
        scores.view(k_heads, -1, tokens, keys)[..., keys - tokens :].add_(_hidden_future(tokens, rows.device))
    return scores


@lru_cache(maxsize=16)
def _hidden_future(tokens: int, device: torch.device) -> torch.Tensor:
    """[T, T]: what hides from a query the keys after its own when it is added to scores."""
    return torch.full((tokens, tokens), float("-inf"), device=device).triu_(1)


def _rows(x: torch.Tensor, k_heads: int) -> torch.Tensor:
    """[T, N, D] -> [K, G * T, D]."""
    tokens, heads, size = x.shape
    return x.view(tokens, k_heads, heads // k_heads, size).permute(1, 2, 0, 3).reshape(k_heads, -1, size)


def _tokens(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """[K, G * T, V] -> [T, N, V]."""
    k_heads, _, size = rows.shape
    return rows.view(k_heads, -1, tokens, size).permute(2, 0, 1, 3).reshape(tokens, -1, size)


def _cap(scores: torch.Tensor, logit_cap: float) -> torch.Tensor:
    return scores.div_(logit_cap).tanh_().mul_(logit_cap) if logit_cap > 0 else scores
