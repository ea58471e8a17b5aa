"""Computes a few tokens before the server reports that it is ready.

Symbol (SGLang 0.5.23): `sglang.srt.managers.io_struct.GenerateReqInput`. Reason: a first request is slow, because it
imports modules, starts threads, grows pools and selects kernels. SGLang's own warm-up sends a request to its HTTP port
without the API key, which SGLang does not know, and caches and counts the request's tokens. Here the requests go to the
tokenizer manager and are not counted (`log_metrics`), and `sglang_patch/warm_up.py` keeps them out of the cache.
A prompt of one token requests no page from any tier of the cache.
"""

from __future__ import annotations

import uuid
from typing import Any

from kt_runtime.sglang_patch.warm_up import RID_PREFIX

FIRST_TOKEN = 0  # an id that every vocabulary has
GREEDY = {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "max_new_tokens": 2, "ignore_eos": True}


async def warm_up(manager: Any) -> None:
    """Runs prefill and decode, greedy and sampled, with and without logprobs. Raises the requests' exceptions."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    requests: tuple[dict[str, Any], ...] = (
        {"sampling_params": dict(GREEDY)},
        {"sampling_params": dict(SAMPLED), "return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0},
    )
    for fields in requests:
        request = GenerateReqInput(
            rid=f"{RID_PREFIX}{uuid.uuid4().hex}", input_ids=[FIRST_TOKEN], log_metrics=False, **fields
        )
        async for _ in manager.generate_request(request, None):
            pass
