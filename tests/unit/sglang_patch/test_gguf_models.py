"""GGUF files in SGLang's own scheduler, against Hugging Face in float32: the names of llama.cpp, its order of rows and
columns, and what it computes of numbers. With linear layers that stay quantized, and dequantized."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from reference.checkpoints.gguf_models import dequantized, expressible, requantize
from reference.checkpoints.transformers_checkpoint import save
from reference.delta_net import hugging_face_in_float64
from reference.resident.native_step import prompt
from reference.resident.scheduler import engine
from reference.server.greedy import load_hugging_face, logprobs_of

from kt_runtime.bench.serve.gguf.model import write_gguf_model
from kt_runtime.experts.packed.weight import PackedWeight
from kt_runtime.families import family_for
from kt_runtime.families.gguf import packed_tensors
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.report import resolve_model
from kt_runtime.sglang_patch.cache.namespace import named_tensors
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.wire.messages import STEP_RUNNING

LENGTHS = (2, 9, 70)
LOGPROB_TOLERANCE = 1e-4
EXPERTS = {"_exps.weight": "Q8_0"}
ALL = {
    **EXPERTS,
    "attn_v.weight": "Q5_0",
    "attn_output.weight": "Q8_0",
    "output.weight": "MXFP4",
    "attn_q.weight": "Q4_0",
    "attn_k.weight": "Q8_0",
}


@pytest.mark.parametrize(
    ("preset", "types"),
    [
        *((preset, types) for preset in ("tiny-mixtral", "tiny-olmoe") for types in (EXPERTS, ALL)),
        ("tiny-gpt-oss", {**ALL, "_exps.weight": "MXFP4"}),
        ("tiny-llama4", ALL),
        ("tiny-qwen3-next", EXPERTS),
        ("tiny-qwen3-5-moe-text", ALL),
    ],
    ids=lambda value: value if isinstance(value, str) else "experts" if value is EXPERTS else "all",
)
def test_served_logprobs_are_those_of_the_weights_that_the_file_stands_for(
    patched_sglang: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, types: dict[str, str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if family_for(expressible(preset).config).keeps_states:  # made weights let states grow, and rounding with them
        save(expressible(preset), tmp_path / "model", torch.bfloat16, fused=True, seed=5)
    else:
        make_model(expressible(preset), tmp_path / "model", seed=5)
    model = tmp_path / "model"
    write_gguf_model(model, tmp_path / "bf16.gguf")
    requantize(tmp_path / "bf16.gguf", tmp_path / "whole.gguf", types)
    plain = load_hugging_face(dequantized(model, tmp_path / "whole.gguf", tmp_path / "plain"))
    with engine(resolve_model(str(tmp_path / "whole.gguf")).directory) as running:
        prompts = {f"r{length}": prompt(length, length) for length in LENGTHS}
        running.run(*(running.request(rid, tokens, logprob_start_len=0) for rid, tokens in prompts.items()))
        family = family_for(running.config)
        assert (native_step.state() == STEP_RUNNING) == (family.decoder_stack(running.config) is not None)
        weights = named_tensors(running.scheduler.tp_worker.model_runner.model).items()
        packed = [name for name, weight in weights if isinstance(weight, PackedWeight)]
        kept, sources = packed_tensors(running.config), family.twin_sources(running.config)
        assert len(packed) == len({source.source for source in sources if source.name in kept})
        if not family.keeps_states:
            assert len(packed) == (0 if types is EXPERTS else 2 * running.config["num_hidden_layers"] + 1)
        for rid, tokens in prompts.items():
            with hugging_face_in_float64():
                expected = logprobs_of(plain, tokens + running.tokens[rid])
            found = np.array(running.prompt_logprobs[rid] + running.logprobs[rid])
            assert np.std(expected) > 0.1
            assert np.abs(found - expected).max() <= LOGPROB_TOLERANCE


@pytest.mark.parametrize("preset", ["tiny-qwen3-moe", "tiny-deepseek-v3"])
def test_sglangs_modules_and_the_step_multiply_by_the_same_quantized_matrices(
    patched_sglang: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_model(preset, tmp_path / "model", seed=5)
    write_gguf_model(model, tmp_path / "bf16.gguf")
    kept = ("attn_q_a.", "attn_kv_a_mqa.", "attn_q_b.", "ffn_gate.", "ffn_up.", "ffn_down.", "_shexp.")
    requantize(tmp_path / "bf16.gguf", tmp_path / "whole.gguf", {**ALL, **dict.fromkeys(kept, "Q8_0")})
    found = []
    for why_not in ("", "it is a test"):
        with monkeypatch.context() as patch, engine(resolve_model(str(tmp_path / "whole.gguf")).directory) as running:
            if why_not:
                patch.setattr(native_step, "_program", None)
            running.run(running.request("r", prompt(40, 40), logprob_start_len=0))
            assert (native_step.state() == STEP_RUNNING) == (not why_not)
            found.append((running.tokens["r"], running.prompt_logprobs["r"], running.logprobs["r"]))
    assert found[0] == found[1]
