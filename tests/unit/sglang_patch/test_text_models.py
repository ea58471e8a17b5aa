"""The language models of Kimi-K2.5, Llama 4 and Qwen3.5 in SGLang's own scheduler, from a checkpoint that transformers
wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.checkpoints import kimi, llama4, qwen3_5
from reference.checkpoints.quantized_checkpoint import quantize_checkpoint
from reference.delta_net import hugging_face_in_float64
from reference.resident.native_step import prompt
from reference.resident.scheduler import engine
from reference.server.greedy import logprobs_of
from transformers import AutoModelForCausalLM

from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.report import resolve_model
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.wire.replies import STEP_RUNNING

LENGTHS = (2, 9, 70)
LOGPROB_TOLERANCE = 1e-4  # 1.1e-5 measured


@pytest.mark.parametrize(
    "whole_model",
    [
        pytest.param(kimi, id="Kimi-K2.5"),
        pytest.param(llama4, id="Llama 4", marks=pytest.mark.slow),
        pytest.param(qwen3_5, id="Qwen3.5", marks=pytest.mark.slow),
    ],
)
def test_served_logprobs_equal_those_of_the_whole_model_in_hugging_face(
    patched_sglang: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_model: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole = whole_model.save(tmp_path / "whole", seed=5)
    with engine(resolve_model(str(whole)).directory) as running:
        prompts = {f"r{length}": prompt(length, length) for length in LENGTHS}
        running.run(*(running.request(rid, tokens, logprob_start_len=0) for rid, tokens in prompts.items()))
        assert native_step.state() == STEP_RUNNING
        plain = whole_model.build(seed=5)
        for rid, tokens in prompts.items():
            with hugging_face_in_float64():
                expected = logprobs_of(plain, tokens + running.tokens[rid])
            found = np.array(running.prompt_logprobs[rid] + running.logprobs[rid])
            assert np.std(expected) > 0.1
            assert np.abs(found - expected).max() <= LOGPROB_TOLERANCE


@pytest.mark.slow
def test_qwen3_5_s_fp8_with_experts_one_by_one_is_served_as_what_it_means(patched_sglang: None, tmp_path: Path) -> None:
    """As its FP8 checkpoints are published: blocks of 128 x 128, a matrix for each expert and projection."""
    source = make_model("tiny-qwen3-5-moe-text", tmp_path / "source", seed=3)
    quantized, exact = quantize_checkpoint(source, tmp_path, "fp8")
    plain = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32).eval()
    tokens = prompt(70, 70)
    with engine(resolve_model(str(quantized)).directory) as running:
        running.run(running.request("r", tokens, logprob_start_len=0))
        with hugging_face_in_float64():
            expected = logprobs_of(plain, tokens + running.tokens["r"])
        found = np.array(running.prompt_logprobs["r"] + running.logprobs["r"])
    assert np.std(expected) > 0.1
    assert np.abs(found - expected).max() <= LOGPROB_TOLERANCE
