"""Training against serving: k3 KL on what a server itself sampled, and how much of it a test may accept."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from reference.greedy import logprobs_of

from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import Model

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 24, 48

UNMEASURED_K3 = 1e-3
"""For processors and GPUs on which k3 was never measured. Derived: the parity test checks that training whose roundings
to bf16 are independent of serving's would exceed it. On a Zen 5 such training would have 2e-3 (Qwen3) and 1.1e-2
(DeepSeek): twice `cost_of_bf16`.
"""


def _largest_k3() -> float:
    """Of training and sampling in bf16: at most ten times the largest that was measured on processors like this one."""
    if torch.cpu._is_amx_tile_supported():
        return UNMEASURED_K3
    if torch.cpu._is_avx512_bf16_supported():
        return 1.5e-13  # Zen 5: 1.9e-14
    return UNMEASURED_K3 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 2e-13  # Zen 3: 2.2e-14


LARGEST_K3 = _largest_k3()


def cost_of_bf16(model: torch.nn.Module, rows: list[list[int]], served: np.ndarray) -> float:
    """k3 KL between float32 and sampling, on the same answers. `model`: the same weights in float32 (Hugging Face)."""
    exact = np.array([logprobs_of(model, row)[-served.shape[1] :] for row in rows])
    return mean_k3(exact - served)


def mean_k3(difference: np.ndarray) -> float:
    """Of the differences of log-probabilities of sampled tokens."""
    return float(np.mean(np.expm1(difference) - difference))


def sampled(api: Any, adapter: str | None) -> tuple[list[list[int]], np.ndarray]:
    """Prompt + answer of each request, and the log-probabilities with which the answers were sampled."""
    prompts = np.random.default_rng(7).integers(3, 700, (NUM_PROMPTS, PROMPT_TOKENS)).tolist()
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "lora_path": [adapter] * NUM_PROMPTS,
        "return_logprob": True,
    }
    answers = api.post("/generate", body)
    rows = [prompt + answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)]
    logprobs = [[item[0] for item in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
    return rows, np.array(logprobs, np.float64)


def k3(
    client: ResidentClient, session: str, rows: list[list[int]], served: np.ndarray, model: Model
) -> tuple[float, float]:
    """(k3 KL of training and sampling, the largest difference of a log-probability), by `model` of `session`."""
    batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
    result = client.forward(session, batch, model=model)
    trained = np.stack([row[-NEW_TOKENS:] for row in result.logprobs]).astype(np.float64)
    difference = trained - served
    return mean_k3(difference), float(np.abs(difference).max())
