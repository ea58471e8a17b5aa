"""Support for KV pages of more than one token.

SGLang 0.5.23:

- `sglang.srt.mem_cache.allocation.get_last_loc` finds the cache slot of a sequence's last token. It starts a
  Triton kernel for every attention backend except two hard-coded names. SGLang's own torch version needs no
  CUDA.
- `sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info` returns, among others, the limit on a prompt's length.
  A request starts once there is room for its prompt plus one page (`PrefillBudget.check_prefill`). A prompt within one
  page of the pool's size would wait forever and block all requests behind it. Within two pages, the answer would be
  truncated to nothing (`max_new_tokens_for_memory`). Both are refused instead.
"""

from __future__ import annotations

from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.mem_cache.allocation.get_last_loc",
    "sglang.srt.mem_cache.allocation.get_last_loc_torch",
    "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info",
)
POOL_TOKENS, LONGEST_PROMPT = 0, 5  # indices into the result of get_worker_info


def install(hooks: Hooks) -> None:
    if not hooks.has_cuda_kernels:
        hooks.replace(SYMBOLS[0], _get_last_loc)
    hooks.after(SYMBOLS[2], _shorten_longest_prompt)


def longest_prompt(pool_tokens: int, page_tokens: int) -> int:
    """Upper bound in tokens. SGLang accepts only shorter prompts, or truncates longer ones to it."""
    return pool_tokens - 2 * page_tokens


def _shorten_longest_prompt(info: tuple[Any, ...], worker: Any) -> tuple[Any, ...]:
    page_tokens = worker.model_runner.token_to_kv_pool_allocator.page_size
    longest = min(info[LONGEST_PROMPT], longest_prompt(info[POOL_TOKENS], page_tokens))
    return (*info[:LONGEST_PROMPT], longest, *info[LONGEST_PROMPT + 1 :])


def _get_last_loc(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*args, **kwargs)
