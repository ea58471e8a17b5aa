"""Experts in the formats of small floats, and by row, in SGLang's own scheduler: against Hugging Face in float32 with
the weights that the checkpoint stands for. One engine computes with the experts of each checkpoint in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from reference.checkpoints.quantized_checkpoint import quantize_checkpoint
from reference.quantized import SCHEMES
from reference.resident.native_step import prompt
from reference.resident.scheduler import Engine, engine
from reference.server.greedy import load_hugging_face, logprobs_of

from kt_runtime.serve.models.make_model import make_model
from kt_runtime.sglang_patch.cpu import moe

LENGTHS = (9, 70)
LOGPROB_TOLERANCE = 4e-5  # 4e-6 was measured: sums in another order


@pytest.fixture(scope="module")
def bf16(patched_sglang: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("tiny-qwen3-moe", tmp_path_factory.mktemp("bf16") / "model", seed=6)


@pytest.fixture(scope="module")
def running(bf16: Path) -> Iterator[Engine]:
    with engine(bf16, "--dtype", "float32") as started:
        yield started


@pytest.mark.parametrize("scheme", ["int8", "fp8_channel", "nvfp4", "mxfp4", "mxfp8"])
def test_served_logprobs_equal_hugging_face_s_with_dequantized_weights(
    scheme: str, running: Engine, bf16: Path, tmp_path: Path
) -> None:
    quantized, plain = quantize_checkpoint(bf16, tmp_path, scheme, experts_only=True)
    running.load_experts(quantized)
    assert moe.expert_store().format == SCHEMES[scheme].format
    running.clear()
    prompts = {f"{scheme} {length}": prompt(length, length) for length in LENGTHS}
    running.run(*(running.request(rid, tokens, logprob_start_len=0) for rid, tokens in prompts.items()))
    model = load_hugging_face(plain)
    for rid, tokens in prompts.items():
        expected = logprobs_of(model, tokens + running.tokens[rid])
        found = np.array(running.prompt_logprobs[rid] + running.logprobs[rid])
        largest = np.abs(found - expected).max()
        print(f"{rid}: largest difference of a logprob {largest:.1e}")
        assert np.std(expected) > 0.1
        assert largest <= LOGPROB_TOLERANCE
