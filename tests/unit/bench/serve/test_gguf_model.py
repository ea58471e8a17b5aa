"""The GGUF file that `bench serve` writes holds the checkpoint's values, in llama.cpp's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kt_runtime.bench.serve.gguf.mix import MIXES, type_of
from kt_runtime.bench.serve.gguf.model import write_gguf_model
from kt_runtime.errors import CheckpointError, UnknownNameError
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset

WIDE = (64, 512)


def written(preset: str, place: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], gguf.GGUFReader]:
    model = make_model(preset, place / preset)
    write_gguf_model(model, place / "model.gguf")
    config = json.loads((model / "config.json").read_text())
    return config, load_file(model / "model.safetensors"), gguf.GGUFReader(place / "model.gguf")


def values(reader: gguf.GGUFReader, name: str) -> torch.Tensor:
    tensor = next(tensor for tensor in reader.tensors if tensor.name == name)
    shape = [int(size) for size in reversed(tensor.shape)]
    if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
        return torch.from_numpy(np.array(tensor.data)).reshape(shape)
    assert tensor.tensor_type == gguf.GGMLQuantizationType.BF16
    return torch.from_numpy(np.array(tensor.data)).reshape(-1).view(torch.bfloat16).reshape(shape)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return written("tiny-qwen3-moe", tmp_path_factory.mktemp("gguf-qwen"))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return written("tiny-deepseek-v3", tmp_path_factory.mktemp("gguf-deepseek"))


def test_matrices_are_the_checkpoint_s_and_vectors_and_router_are_float32(qwen: Any) -> None:
    _, tensors, reader = qwen
    same = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
        "blk.0.attn_k_norm.weight": "model.layers.0.self_attn.k_norm.weight",
        "blk.2.ffn_gate_inp.weight": "model.layers.2.mlp.gate.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for name, ours in same.items():
        found = values(reader, name)
        is_float32 = "norm" in name or "gate_inp" in name
        assert found.dtype == (torch.float32 if is_float32 else torch.bfloat16)
        assert torch.equal(found, tensors[ours].to(found.dtype))


@pytest.mark.parametrize("model", ["qwen", "deepseek"])
def test_experts_are_stacked_and_nothing_is_left_out(model: str, request: pytest.FixtureRequest) -> None:
    _, tensors, reader = request.getfixturevalue(model)
    for projection in ("gate", "up", "down"):
        names = [f"model.layers.2.mlp.experts.{expert}.{projection}_proj.weight" for expert in range(8)]
        expected = torch.stack([tensors[name] for name in names])
        assert torch.equal(values(reader, f"blk.2.ffn_{projection}_exps.weight"), expected)
    count = sum(int(np.prod(tensor.shape)) for tensor in reader.tensors)
    assert count == sum(tensor.numel() for tensor in tensors.values())


def test_kv_b_is_split_by_head_and_its_keys_are_transposed(deepseek: Any) -> None:
    config, tensors, reader = deepseek
    keys, own = values(reader, "blk.1.attn_k_b.weight"), values(reader, "blk.1.attn_v_b.weight")
    joined = torch.cat([keys.transpose(1, 2), own], dim=1)
    assert keys.shape == (4, config["kv_lora_rank"], config["qk_nope_head_dim"])
    assert torch.equal(joined.reshape(-1, 64), tensors["model.layers.1.self_attn.kv_b_proj.weight"])
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(values(reader, "blk.1.exp_probs_b.bias"), bias)


def test_keys_are_the_config_s(qwen: Any, deepseek: Any) -> None:
    def key(reader: gguf.GGUFReader, name: str) -> Any:
        return reader.fields[name].contents()

    config, _, reader = qwen
    assert key(reader, "general.architecture") == "qwen3moe"
    for name, ours in (
        ("block_count", "num_hidden_layers"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("expert_count", "num_experts"),
        ("expert_used_count", "num_experts_per_tok"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("rope.freq_base", "rope_theta"),
    ):
        assert key(reader, f"qwen3moe.{name}") == config[ours]
    config, _, reader = deepseek
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    expected = {
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rope,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "rope.scaling.type": "yarn",
        "rope.scaling.original_context_length": 1024,
    }
    assert {name: key(reader, f"deepseek2.{name}") for name in expected} == expected
    assert key(reader, "deepseek2.rope.scaling.yarn_log_multiplier") == pytest.approx(
        0.1, rel=1e-7, abs=0
    )  # as float32


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_s_matrices_are_blocks_of_the_checkpoint_s_values(mix: str, qwen: Any, tmp_path: Path) -> None:
    """Within half a step of the largest value of a block: 1 / 31 of it in five bits, 1 / 127 in eight, a quarter in
    e2m1, whose scales are powers of two."""
    _, tensors, _ = qwen
    model = make_model("tiny-qwen3-moe", tmp_path / "m")
    write_gguf_model(model, tmp_path / "model.gguf", mix)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert gguf.LlamaFileType(reader.fields["general.file_type"].contents()).name == f"MOSTLY_{mix}"
    stored = {tensor.name: tensor for tensor in reader.tensors}
    wanted = {
        "blk.1.attn_q.weight": tensors["model.layers.1.self_attn.q_proj.weight"],
        "blk.2.ffn_up_exps.weight": torch.stack(
            [tensors[f"model.layers.2.mlp.experts.{expert}.up_proj.weight"] for expert in range(8)]
        ),
    }
    for name, values_wanted in wanted.items():
        kind = {"Q8_0": "Q8_0", "Q4_K_M": "Q5_0", "MXFP4_MOE": "MXFP4" if "_exps" in name else "Q8_0"}[mix]
        assert stored[name].tensor_type.name == kind
        found = gguf.quants.dequantize(np.array(stored[name].data), stored[name].tensor_type)
        assert found.shape == values_wanted.shape
        largest = np.abs(values_wanted.float().numpy()).max()
        part = {"Q8_0": 100, "Q5_0": 15, "MXFP4": 3}[kind]
        assert np.abs(found - values_wanted.float().numpy()).max() < largest / part
    assert all(stored[name].tensor_type.name == "F32" for name in ("output_norm.weight", "blk.0.ffn_gate_inp.weight"))


def test_types_of_a_mix_are_those_that_llama_cpp_s_quantizer_chose() -> None:
    """`llama_model_quantize` of llama-cpp-python 0.3.36 wrote files of these shapes in Q4_K_M."""
    qwen = load_preset("tiny-qwen3-moe").config
    nine = {**qwen, "num_hidden_layers": 9, "num_experts": 16}
    with_more_bits = [
        layer for layer in range(9) if type_of("Q4_K_M", f"blk.{layer}.attn_v.weight", WIDE, nine) == "Q6_K"
    ]
    assert with_more_bits == [0, 3, 6, 7, 8]
    down = [type_of("Q4_K_M", f"blk.{layer}.ffn_down_exps.weight", WIDE, nine) for layer in range(9)]
    assert [layer for layer, kind in enumerate(down) if kind == "Q6_K"] == with_more_bits
    assert type_of("Q4_K_M", "blk.0.ffn_up_exps.weight", WIDE, nine) == "Q4_K"
    assert type_of("Q4_K_M", "output.weight", WIDE, nine) == "Q6_K"
    assert type_of("Q4_K_M", "token_embd.weight", WIDE, nine) == "Q4_K"
    assert type_of("Q4_K_M", "token_embd.weight", WIDE, {**nine, "tie_word_embeddings": True}) == "Q6_K"
    eight = {name: type_of("Q4_K_M", f"blk.1.attn_{name}.weight", WIDE, qwen) for name in ("q", "k", "v", "output")}
    assert eight == {"q": "Q4_K", "k": "Q8_0", "v": "Q8_0", "output": "Q5_K"}
    narrow = (64, 128)
    found = [type_of("Q4_K_M", name, narrow, qwen) for name in ("token_embd.weight", "output.weight")]
    assert found == ["Q5_0", "Q8_0"] and type_of("Q4_K_M", "blk.1.attn_output.weight", narrow, qwen) == "Q5_1"
    assert type_of("Q8_0", "blk.1.attn_v.weight", WIDE, nine) == "Q8_0"
    with pytest.raises(UnknownNameError, match=r"mix of a GGUF file 'Q4_K_S'.*Q8_0"):
        type_of("Q4_K_S", "output.weight", WIDE, nine)


def test_the_tokenizer_is_in_the_file(qwen: Any) -> None:
    config, _, reader = qwen
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    assert len(tokens) == len(types) == config["vocab_size"] and len(set(tokens)) == len(tokens)
    assert tokens[config["eos_token_id"]] == "<|im_end|>" and types[:4] == [3, 3, 3, 1]
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    assert all("".join(merge.split(" ")) in tokens for merge in merges)


def test_a_checkpoint_that_gguf_can_t_hold_is_refused(tmp_path: Path) -> None:
    model = make_model("tiny-qwen3-moe", tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_scaling": {"type": "linear", "factor": 2}}))
    with pytest.raises(CheckpointError, match="the rope is 'linear'"):
        write_gguf_model(model, tmp_path / "model.gguf")
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"far": 5000}, "merges": []}}')
    with pytest.raises(CheckpointError, match=r"token 'far' has id 5000; config\.json has a vocab_size of"):
        write_gguf_model(model, tmp_path / "model.gguf")
    (model / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    with pytest.raises(CheckpointError, match="is Unigram"):
        write_gguf_model(model, tmp_path / "model.gguf")
    narrow = make_model("tiny-glm-moe-dsa", tmp_path / "narrow")
    with pytest.raises(CheckpointError, match=r"'index_head_dim' is 32; llama\.cpp rotates .* 64 elements at a time"):
        write_gguf_model(narrow, tmp_path / "model.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "narrow"]
