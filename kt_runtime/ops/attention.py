"""Scaled dot-product attention for training on a CPU: its forward pass is serving's, bit for bit.

B sequences, T queries, L keys, N query heads, K key heads, D key size, V value size. Scores, softmax and sums are
float32. Absorbed MLA is the case K = 1.

`kt_runtime.experts.attention` computes the forward pass, as in serving (`sglang_patch.cpu.attention`), and gradients
from the log of sums that the forward pass keeps. This module does not import SGLang.
"""

from __future__ import annotations

import torch

from kt_runtime.experts import attention


def attend_batch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    logit_cap: float = 0.0,
    log_sums: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    window: int = 0,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [B, T, N, D], k [B, L, K, D], v [B, L, K, V] -> float32 [B, T, N, V], on a CPU.

    Query t sees keys 0 to L - T + t. A `logit_cap` above 0 caps scores softly: cap * tanh(score / cap). `log_sums`
    [B, T, N], float32, is an optional output: log of the sum over keys of exp(score). `sinks` [N] float32, `window`
    and `chosen` [B T, top_k] as in `kt_runtime.experts.attention.attend`.
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
        sinks=sinks,
        window=window,
        out_dtype=torch.float32,
        log_sums=rows,
        chosen=chosen,
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
    window: int = 0,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `attend_batch` for q, k and v, in their dtypes; grad_out [B, T, N, V].

    `out` [B, T, N, V] and `log_sums` [B, T, N] are the results of `attend_batch`.
    """
    batch, tokens = q.shape[:2]
    sequences = attention.contiguous(batch, tokens, k.shape[1])
    grad_out, out, log_sums = (x.flatten(0, 1) for x in (grad_out, out, log_sums))
    rows = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
    by_q, by_k, by_v = attention.attend_backward(grad_out, *rows, out, log_sums, sequences, scaling, window, chosen)
    return by_q.view(q.shape), by_k.view(k.shape), by_v.view(v.shape)
