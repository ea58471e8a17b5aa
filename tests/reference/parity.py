"""Training against serving: log-probabilities of what a server itself sampled. On a CPU both must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from reference.server.greedy import logprobs_of

from kt_runtime.serve.models.presets import Preset, load_preset
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import Model

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 24, 48

GPU_K3 = 1e-3
"""The largest k3 KL that a GPU's tests accept: SGLang and PyTorch compute there, in their own orders. Derived: the
parity test checks that training whose roundings to bf16 are independent of serving's would exceed it. With AMX such
training would have 4e-3 to 3e-2 on fixed random tokens: twice `cost_of_bf16` of three tiny models.
"""


def tiny_deepseek_v2() -> Preset:
    """`tiny-deepseek-v3` as a DeepSeek-V2: softmax routing among groups, no `q_lora_rank`."""
    preset = load_preset("tiny-deepseek-v3")
    changed = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    }
    return msgspec.structs.replace(preset, name="tiny-deepseek-v2", config={**preset.config, **changed})


@dataclass(frozen=True)
class Agreement:
    """Of log-probabilities in training and in serving."""

    k3: float
    """k3 KL (http://joschu.net/blog/kl-approx.html): the mean of e^d - 1 - d over the differences d."""
    largest: float
    """The largest absolute difference."""
    median: float = 0.0
    """The absolute difference that half of them have at most. A token whose routing has two nearly equal experts, and
    gets the other one, hardly moves it."""

    @classmethod
    def of(cls, trained: Sequence[np.ndarray], served: np.ndarray) -> Agreement:
        """`served` [B, N]: of the last N tokens of each row; `trained`: of all tokens of each row but the first."""
        last = np.stack([row[-served.shape[1] :] for row in trained]).astype(np.float64)
        difference = last - served
        return cls(mean_k3(difference), float(np.abs(difference).max()), float(np.median(np.abs(difference))))


def cost_of_bf16(model: torch.nn.Module, rows: list[list[int]], served: np.ndarray) -> float:
    """k3 KL between float32 and serving, on the same tokens. `model`: the same weights in float32 (Hugging Face)."""
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


def trained(client: ResidentClient, session: str, rows: list[list[int]], model: Model) -> list[np.ndarray]:
    """Log-probabilities of every token of each row but the first, by `model` of `session`."""
    batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
    return list(client.forward(session, batch, model=model).logprobs)


def agreement(
    client: ResidentClient, session: str, sample: tuple[list[list[int]], np.ndarray], model: Model
) -> Agreement:
    """Of training and `sample`, a result of `sampled`."""
    rows, served = sample
    return Agreement.of(trained(client, session, rows, model), served)
