"""A few tokens are computed before the server says that it is ready.

Symbol (SGLang 0.5.23): `sglang.srt.managers.io_struct.GenerateReqInput`. Reason: what runs for the first time is slow:
modules are imported, threads started, pools grown, kernels chosen. SGLang's own warm-up sends a request to its HTTP
port, without the API key, which it does not know, puts the request's tokens into the prefix cache and counts them.
Here the requests go to the tokenizer manager, uncounted (`log_metrics`), and `warm_up.py` keeps the cache as it was.
One token of prompt asks no tier of the cache for a page.
"""

from __future__ import annotations

import uuid
from typing import Any

from kt_runtime.sglang_patch.warm_up import RID_PREFIX

FIRST_TOKEN = 0  # every vocabulary has it
GREEDY = {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "max_new_tokens": 2, "ignore_eos": True}


async def warm_up(manager: Any) -> None:
    """Prefill and decode, greedy and sampled, with and without logprobs. Raises what the requests raise."""
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
