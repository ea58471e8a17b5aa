"""Prompts nearly as long as the pool, held against SGLang's own rule for when a request is begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch.cache.paging import LONGEST_PROMPT, POOL_TOKENS, _shorten_longest_prompt, longest_prompt

POOL = 1024


def admission(prompt: int, page_tokens: int) -> tuple[bool, int]:
    """(whether it is ever begun, tokens that its answer may have): what `Scheduler.init_req_max_new_tokens` and
    `PrefillAdder.add_one_req` come to for one request alone."""
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.prefill_budget import PrefillBudget

    allocator: Any = SimpleNamespace(page_size=page_tokens, available_size=lambda: POOL)
    tree: Any = SimpleNamespace(supports_mamba=lambda: False, evictable_size=lambda: 0)
    answer = BaseTokenToKVPoolAllocator.max_new_tokens_for_memory(
        allocator, prompt, POOL, token_capacity=POOL, sliding_window_size=None, chunk_size=None
    )
    begins, _ = PrefillBudget(allocator, tree).check_prefill(
        extend_input_len=prompt,
        total_tokens=prompt + answer + page_tokens,
        max_new_tokens=answer,
        input_tokens=prompt,
        swa_host_hit_length=0,
        chunk_limit=None,
    )
    return begins, answer


@pytest.mark.parametrize("page_tokens", [2, 8, 64, 256])
def test_every_prompt_that_is_taken_is_begun_and_answered_and_longer_ones_would_not_be(page_tokens: int) -> None:
    longest = longest_prompt(POOL, page_tokens)
    for prompt in (1, page_tokens, longest - 1, longest):
        begins, answer = admission(prompt, page_tokens)
        assert begins and answer > 0, prompt
    for prompt in range(longest + 1, POOL):
        begins, answer = admission(prompt, page_tokens)
        assert answer == 0 and begins == (prompt < POOL - page_tokens), prompt


@pytest.mark.parametrize(("page_tokens", "longest"), [(1, 1018), (2, 1018), (64, 896)])
def test_the_workers_answer_is_lowered_where_that_is_needed(page_tokens: int, longest: int) -> None:
    info = (POOL, 16384, 32, None, POOL - 1, POOL - 6, "seed", "cpu", None, 1, 2, 3)
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(page_size=page_tokens))
    )
    changed = _shorten_longest_prompt(info, worker)
    assert changed[LONGEST_PROMPT] == longest and changed[POOL_TOKENS] == POOL
    assert [value for at, value in enumerate(changed) if at != LONGEST_PROMPT] == [
        value for at, value in enumerate(info) if at != LONGEST_PROMPT
    ]


def test_the_positions_are_those_of_sglangs_answer() -> None:
    import inspect

    from sglang.srt.managers.tp_worker import TpModelWorker

    source = inspect.getsource(TpModelWorker.get_worker_info)
    names = [line.strip().rstrip(",") for line in source[source.rindex("return (") :].splitlines()[1:]]
    assert names[POOL_TOKENS].endswith("max_total_num_tokens") and names[LONGEST_PROMPT] == "max_req_input_len"
