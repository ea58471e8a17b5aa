"""GGUF files in SGLang's own scheduler, with linear layers that stay quantized, and dequantized.

Of eleven families against Hugging Face in float32: the names of llama.cpp, its order of rows and columns, and what it
computes of numbers. Of Qwen3 and DeepSeek, in every type of a linear layer: the step, SGLang's modules and training,
bit by bit.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from reference import lora
from reference.cases import choose
from reference.checkpoints.gguf_models import dequantized, expressible, requantize
from reference.checkpoints.transformers_checkpoint import save
from reference.delta_net import hugging_face_in_float64
from reference.resident.native_step import installed, prompt
from reference.resident.scheduler import Engine, engine
from reference.server.greedy import load_hugging_face, logprobs_of
from reference.server.random_traffic import Row, Trainer

from kt_runtime.adapters import AdapterTensors
from kt_runtime.bench.serve.gguf.model import write_gguf_model
from kt_runtime.experts.packed.weight import PackedWeight
from kt_runtime.families import family_for
from kt_runtime.families.gguf import DENSE_TYPES, packed_tensors
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.serve.models.report import resolve_model
from kt_runtime.sglang_patch.cache.namespace import named_tensors
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.wire.replies import STEP_RUNNING

LENGTHS = (2, 9, 70)
MODELS = (None, "one")  # the base, and an adapter
LOGPROB_TOLERANCE = 1e-4  # 5.4e-5 measured, with GLM-4.7-Flash
EXPERTS = {"_exps.weight": "Q8_0"}
ALL = {
    **EXPERTS,
    "attn_v.weight": "Q5_0",
    "attn_output.weight": "Q8_0",
    "output.weight": "MXFP4",
    "attn_q.weight": "Q4_0",
    "attn_k.weight": "Q8_0",
}


# By preset: types, and the parts of a layer that stay quantized then; None: its layers differ.
SERVED = {
    "tiny-mixtral": (ALL, 2),
    "tiny-olmoe": (EXPERTS, 0),
    "tiny-glm4-moe": (ALL, 2),
    "tiny-minimax-m2": (ALL, 2),
    "tiny-glm4-moe-lite": (ALL, 1),
    "tiny-deepseek-v32": (ALL, 1),
    "tiny-glm-moe-dsa": (ALL, 1),
    "tiny-gpt-oss": ({**ALL, "_exps.weight": "MXFP4"}, 2),
    "tiny-llama4": (ALL, 2),
    "tiny-qwen3-next": (EXPERTS, None),
    "tiny-qwen3-5-moe-text": (ALL, None),
}
# Grouped and latent attention, fused experts with biases, recurrent layers. All: ../serve/models/test_gguf_model.py.
FEW = ["tiny-deepseek-v32", "tiny-gpt-oss"]


@pytest.mark.parametrize("preset", choose(few=FEW, usual=list(SERVED), every=list(SERVED)))
def test_served_logprobs_are_those_of_the_weights_that_the_file_stands_for(
    patched_sglang: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    types, kept = SERVED[preset]
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
        kept_names, sources = packed_tensors(running.config), family.twin_sources(running.config)
        assert len(packed) == len({source.source for source in sources if source.name in kept_names})
        if kept is not None:
            assert len(packed) == (kept * running.config["num_hidden_layers"] + 1 if kept else 0)
        for rid, tokens in prompts.items():
            with hugging_face_in_float64():
                expected = logprobs_of(plain, tokens + running.tokens[rid])
            found = np.array(running.prompt_logprobs[rid] + running.logprobs[rid])
            assert np.std(expected) > 0.1
            assert np.abs(found - expected).max() <= LOGPROB_TOLERANCE


# Preset, changes of its config, dtype, types. Between them every type of a linear layer. MLA's inner sizes are no whole
# blocks of 256 columns.
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256}
KEPT: dict[str, tuple[str, dict[str, int], str, dict[str, str]]] = {
    "qwen3_moe, float32": ("tiny-qwen3-moe", {}, "float32", ALL),
    "qwen3_moe, bfloat16": (
        "tiny-qwen3-moe",
        WIDE,
        "bfloat16",
        {"ffn_down_exps": "IQ4_XS", "_exps": "Q5_K", "attn_q.": "Q4_K", "attn_k.": "Q5_K", "attn_v.": "Q6_K"}
        | {"attn_output.": "IQ4_NL", "output.": "IQ4_XS"},
    ),
    "deepseek_v3, bfloat16": (
        "tiny-deepseek-v3",
        WIDE,
        "bfloat16",
        {"_exps": "Q8_0", "attn_q_a.": "Q4_K", "attn_kv_a_mqa.": "Q6_K", "attn_q_b.": "Q8_0", "attn_output.": "Q4_0"}
        | {"ffn_gate_shexp.": "IQ4_XS", "ffn_up_shexp.": "Q5_0", "ffn_down_shexp.": "MXFP4"}
        | {"ffn_gate.": "Q5_K", "ffn_up.": "IQ4_NL", "ffn_down.": "Q8_0", "output.": "Q6_K"},
    ),
}


def test_every_type_of_a_linear_layer_is_kept_here() -> None:
    kinds = {kind for *_, types in KEPT.values() for part, kind in types.items() if "_exps" not in part}
    assert kinds == set(DENSE_TYPES)


@pytest.mark.parametrize("case", choose(few=["deepseek_v3, bfloat16"], usual=list(KEPT), every=list(KEPT)))
def test_the_step_sglangs_modules_and_training_multiply_by_the_same_quantized_matrices(
    patched_sglang: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The same bits, with an adapter on every module too."""
    name, changes, dtype, types = KEPT[case]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    preset = load_preset(name)
    model = make_model(msgspec.structs.replace(preset, config=preset.config | changes), tmp_path / "model", seed=5)
    write_gguf_model(model, tmp_path / "bf16.gguf")
    requantize(tmp_path / "bf16.gguf", tmp_path / "whole.gguf", types)
    directory = resolve_model(str(tmp_path / "whole.gguf")).directory
    found = []
    for why_not in ("", "it is a test"):
        with monkeypatch.context() as patch, engine(directory, "--dtype", dtype) as running:
            if why_not:
                patch.setattr(native_step, "_program", None)
            adapter = lora.random_adapter(running.config, rank=4, alpha=6.0, seed=2)
            with installed(running, one=adapter):
                requests = [running.request(str(to), prompt(40, 40), logprob_start_len=0, lora_id=to) for to in MODELS]
                running.run(*requests)
            assert (native_step.state() == STEP_RUNNING) == (not why_not)
            found.append((running.tokens, running.prompt_logprobs, running.logprobs))
            if not why_not:
                check_training(running, adapter)
    assert found[0] == found[1]
    tokens = found[0][0]
    assert tokens["None"] != tokens["one"]


def check_training(running: Engine, adapter: AdapterTensors) -> None:
    rows = {str(to): Row(to, prompt(40, 40) + running.tokens[str(to)]) for to in MODELS}
    trained = Trainer(running, {"one": adapter}).logprobs(rows, max_tokens=64)
    for rid, logprobs in trained.items():
        served = np.array(running.prompt_logprobs[rid] + running.logprobs[rid], np.float32)
        assert np.array_equal(logprobs.numpy(), served)
