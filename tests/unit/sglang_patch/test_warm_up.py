"""The first requests, which a live server makes in tests/system/serving/test_http.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch.frontend.warm_up import warm_up
from kt_runtime.sglang_patch.warm_up import RID_PREFIX, leave_no_trace


class Manager:
    """Takes requests as SGLang's tokenizer manager does; `error` is raised in place of the second answer."""

    def __init__(self, error: Exception | None = None) -> None:
        self.requests: list[Any] = []
        self.error = error

    async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[Any]:
        self.requests.append(obj)
        if self.error is not None and len(self.requests) == 2:
            raise self.error
        yield {"text": ""}


def test_requests_are_uncounted_marked_and_ask_no_tier_for_a_page(patched_sglang: None) -> None:
    manager = Manager()
    asyncio.run(warm_up(manager))
    greedy, sampled = manager.requests
    assert all(request.rid.startswith(RID_PREFIX) and not request.log_metrics for request in manager.requests)
    assert all(len(request.input_ids) == 1 for request in manager.requests) and greedy.rid != sampled.rid
    assert all(request.sampling_params["max_new_tokens"] == 2 for request in manager.requests)
    assert (greedy.sampling_params["temperature"], sampled.sampling_params["temperature"]) == (0.0, 1.0)
    assert sampled.return_logprob and not greedy.return_logprob


def test_a_model_that_can_not_answer_is_an_error(patched_sglang: None) -> None:
    with pytest.raises(RuntimeError, match="no logits"):
        asyncio.run(warm_up(Manager(RuntimeError("no logits"))))


def test_only_the_warm_ups_requests_stay_out_of_the_prefix_cache() -> None:
    for rid, kept_out in ((f"{RID_PREFIX}1", True), ("client-1", False), (None, False), (7, False)):
        request = SimpleNamespace(rid=rid, skip_radix_cache_insert=False)
        leave_no_trace(None, request)
        assert request.skip_radix_cache_insert is kept_out
