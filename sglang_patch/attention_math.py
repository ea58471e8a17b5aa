"""Scaled dot-product attention of one sequence's new queries over its cached keys, and of a batch of single queries.

T queries, L keys, N query heads, G query heads per key head, K key heads, D key size, V value size. Everything is
computed in float32, whatever the cache's dtype is: the scores, the softmax and the sums. Grouped-query attention keeps
keys as they are: the G queries of a key head become rows of one matrix product. Absorbed MLA is the case K = 1.

Queries are taken in blocks, so that scores never need more than `SCORE_BUDGET` numbers, and a block looks only at the
keys that it may see. Knows nothing of SGLang.
"""

from __future__ import annotations

import torch

SCORE_BUDGET = 1 << 23  # numbers in one block of scores: 32 MiB


def attend_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix_tokens: int, scaling: float, logit_cap: float = 0.0
) -> torch.Tensor:
    """q [T, N, D], k [L, K, D], v [L, K, V] with L = prefix_tokens + T -> float32 [T, N, V].

    Query t sees keys 0 to prefix_tokens + t. A `logit_cap` above 0 caps scores softly: cap * tanh(score / cap).
    """
    tokens, heads, _ = q.shape
    keys = k.shape[0]
    if keys != prefix_tokens + tokens:
        raise AssertionError(f"{keys} keys, but prefix {prefix_tokens} + {tokens} queries")
    out = torch.empty(tokens, heads, v.shape[-1], dtype=torch.float32, device=q.device)
    k_heads, v_heads = k.float().transpose(0, 1), v.float().transpose(0, 1)
    block = max(1, SCORE_BUDGET // (heads * keys))
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        visible = prefix_tokens + stop
        out[start:stop] = _attend_block(
            q[start:stop].float(), k_heads[:, :visible], v_heads[:, :visible], scaling, logit_cap
        )
    return out


def attend_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scaling: float, logit_cap: float = 0.0
) -> torch.Tensor:
    """q [B, N, D], k [B, L, K, D], v [B, L, K, V], lengths [B] -> float32 [B, N, V].

    Keys from lengths[b] on are padding.
    """
    batch, heads, size = q.shape
    length, k_heads = k.shape[1], k.shape[2]
    grouped = q.float().view(batch, k_heads, heads // k_heads, size)
    scores = torch.matmul(grouped, k.float().permute(0, 2, 3, 1)).mul_(scaling)  # [B, K, G, L]
    scores = _cap(scores, logit_cap)
    padding = torch.arange(length, device=q.device) >= lengths[:, None]
    scores.masked_fill_(padding[:, None, None, :], float("-inf"))
    out = torch.matmul(torch.softmax(scores, dim=-1), v.float().transpose(1, 2))
    return out.reshape(batch, heads, v.shape[-1])


def _attend_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, logit_cap: float) -> torch.Tensor:
    """q [T, N, D], k [K, L, D], v [K, L, V]; the last query sees all L keys, each one before it one key fewer."""
    tokens, heads, size = q.shape
    k_heads, keys, _ = k.shape
    group = heads // k_heads
    rows = q.view(tokens, k_heads, group, size).permute(1, 2, 0, 3).reshape(k_heads, group * tokens, size)
    scores = _cap(torch.bmm(rows, k.transpose(1, 2)).mul_(scaling), logit_cap)
    if tokens > 1:
        future = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).triu_(keys - tokens + 1)
        scores.view(k_heads, group, tokens, keys).masked_fill_(future, float("-inf"))
    out = torch.bmm(torch.softmax(scores, dim=-1), v)
    return out.view(k_heads, group, tokens, -1).permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def _cap(scores: torch.Tensor, logit_cap: float) -> torch.Tensor:
    return scores.div_(logit_cap).tanh_().mul_(logit_cap) if logit_cap > 0 else scores
