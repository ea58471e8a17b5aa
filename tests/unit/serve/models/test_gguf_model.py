"""A GGUF file as a model: its config, tensors and tokenizer are those of the checkpoint it was written from."""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gguf
import pytest
import torch
from reference.checkpoints.gguf_models import expressible, requantize
from safetensors.torch import load_file
from transformers import AutoTokenizer

from kt_runtime.bench.serve.gguf.model import write_gguf_model
from kt_runtime.errors import CheckpointError, InvalidValueError, NotFoundError
from kt_runtime.families import family_for
from kt_runtime.families.gguf import config_of as config_from_keys
from kt_runtime.families.gguf import packed_bytes, packed_tensors
from kt_runtime.families.quantization import quantization_of
from kt_runtime.serve.memory.plan import ServingShape, plan_memory
from kt_runtime.serve.models.checkpoint_files import check_checkpoint
from kt_runtime.serve.models.gguf_model import gguf_directory
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.serve.models.report import resolve_model
from kt_runtime.sglang_patch.cpu.weights import gguf_tensors

PRESETS = (
    *("tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-mixtral", "tiny-olmoe"),
    *("tiny-glm4-moe", "tiny-minimax-m2"),
    *("tiny-gpt-oss", "tiny-llama4", "tiny-qwen3-next", "tiny-qwen3-5-moe-text"),
    *("tiny-deepseek-v32", "tiny-glm-moe-dsa"),
)
# What a GGUF file does not hold, and neither serving nor training reads.
NOT_KEPT = (
    {"attention_dropout", "initializer_range", "max_window_layers", "output_router_logits", "router_aux_loss_coef"}
    | {"sliding_window", "use_cache", "use_sliding_window", "aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"}
    | {"pad_token_id", "num_nextn_predict_layers", "num_mtp_modules", "mtp_transformer_layers", "use_mtp"}
    | {"attn_type_list", "router_jitter_noise", "initial_context_length", "for_llm_compressor"}
    | {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
    | {"index_skip_topk_offset", "index_topk_freq", "mlp_layer_types"}  # other keys say the same
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """`make(preset)`: (the checkpoint, its GGUF file with experts in Q8_0), made once."""

    @functools.cache
    def make_once(preset: str) -> tuple[Path, Path]:
        place = tmp_path_factory.mktemp("gguf")
        model = make_model(expressible(preset), place / "model", seed=3)
        write_gguf_model(model, place / "bf16.gguf")
        requantize(place / "bf16.gguf", place / "tiny.Q8_0.gguf", {"_exps.weight": "Q8_0"})
        return model, place / "tiny.Q8_0.gguf"

    return make_once


@pytest.fixture(params=PRESETS)
def made(request: pytest.FixtureRequest, make: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    """Of each family."""
    return make(request.param)


@pytest.fixture
def made_one(make: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    """For what does not depend on the family."""
    return make("tiny-qwen3-moe")


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def test_the_config_is_the_checkpoint_s(made: tuple[Path, Path]) -> None:
    model, path = made
    found = resolve_model(str(path))
    assert found.name == "tiny.Q8_0"
    not_kept = NOT_KEPT - ({"sliding_window"} if found.family.name == "gpt_oss" else set())
    wanted = {key: value for key, value in config_of(model).items() if key not in not_kept}
    assert {key: found.config.get(key) for key in wanted} == wanted
    layers = found.family.moe_layers(found.config)
    assert found.config["quantization_config"]["experts"] == [["Q8_0", "Q8_0"]] * len(layers)
    quantization = quantization_of(found.config)
    assert quantization is not None and quantization.expert_format.name == "int8_g32"


def test_dense_tensors_are_the_checkpoint_s_under_its_names(made: tuple[Path, Path]) -> None:
    model, path = made
    config = config_of(gguf_directory(path))
    wanted = {
        name: tensor for name, tensor in load_file(model / "model.safetensors").items() if ".experts." not in name
    }
    found = dict(gguf_tensors([path], config, torch.bfloat16))
    assert set(found) == set(wanted)
    family = family_for(config)
    for name, tensor in found.items():
        # The file holds one more than an offset, in float32: a tiny offset loses up to 2^-24, then bf16 rounds it.
        most = 2.0**-23 if family.is_offset(name) else 0.0
        assert torch.allclose(tensor.to(wanted[name].dtype), wanted[name], rtol=0.0, atol=most), name


def test_the_tokenizer_is_made_from_the_file_s_keys(made: tuple[Path, Path]) -> None:
    model, path = made
    ours, theirs = (AutoTokenizer.from_pretrained(place) for place in (gguf_directory(path), model))
    for text in ("Where is Saltmere?", "äöü  \n\tx1234", "".join(theirs.all_special_tokens) + "a"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.decode(list(range(700))) == theirs.decode(list(range(700)))
    assert ours.eos_token == theirs.eos_token


@pytest.mark.parametrize(
    ("split", "parts"),
    [
        ("qwen2", ["HelloWorld", "'s", "Ġ", "1", "2", "3", "4", "!Ċ", "/b"]),
        ("glm4", ["HelloWorld", "'s", "Ġ", "123", "4", "!Ċ", "/b"]),
        ("minimax-m2", ["Hello", "World's", "Ġ", "123", "4", "!Ċ/", "b"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path: Path, split: str, parts: list[str]) -> None:
    model = make_model("tiny-qwen3-moe", tmp_path / "model", seed=3)
    write_gguf_model(model, tmp_path / "bf16.gguf")
    requantize(tmp_path / "bf16.gguf", tmp_path / "m.gguf", {}, keys={"tokenizer.ggml.pre": split})
    tokenizer = AutoTokenizer.from_pretrained(gguf_directory(tmp_path / "m.gguf"))
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("HelloWorld's 1234!\n/b")
    assert [text for text, _ in found] == parts


def test_a_first_token_is_added_where_the_file_says_so(made_one: tuple[Path, Path], tmp_path: Path) -> None:
    requantize(made_one[1], tmp_path / "m.gguf", {}, keys={"tokenizer.ggml.add_bos_token": True})
    with_first = AutoTokenizer.from_pretrained(gguf_directory(tmp_path / "m.gguf"))
    plain = AutoTokenizer.from_pretrained(gguf_directory(made_one[1]))
    assert with_first("a b")["input_ids"] == [with_first.bos_token_id, *plain("a b")["input_ids"]]


def test_a_tokenizer_beside_the_file_is_taken(made_one: tuple[Path, Path], tmp_path: Path) -> None:
    model, path = made_one
    shutil.copy(path, tmp_path / "m.gguf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path / name)
    directory = gguf_directory(tmp_path / "m.gguf")
    assert (directory / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_the_directory_is_made_once_and_anew_for_a_changed_file(made_one: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copy(made_one[1], tmp_path / "m.gguf")
    directory = gguf_directory(tmp_path / "m.gguf")
    made_at = (directory / "config.json").stat().st_mtime_ns
    assert gguf_directory(tmp_path / "m.gguf") == directory
    assert (directory / "config.json").stat().st_mtime_ns == made_at
    (tmp_path / "m.gguf").touch()
    with pytest.raises(CheckpointError, match="has changed since its config was made"):
        check_checkpoint(directory)
    assert gguf_directory(tmp_path / "m.gguf") == directory
    check_checkpoint(directory)


def test_a_split_model_is_served_from_its_first_file(made: tuple[Path, Path], tmp_path: Path) -> None:
    requantize(made[1], tmp_path / "m.gguf", {}, split=9)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2
    found = resolve_model(str(parts[0]))
    assert found.config["quantization_config"]["files"] == [str(part) for part in parts]
    whole = dict(gguf_tensors([made[1]], config_of(gguf_directory(made[1])), torch.bfloat16))
    for name, tensor in gguf_tensors(parts, found.config, torch.bfloat16):
        assert torch.equal(tensor, whole[name])
    parts[-1].unlink()
    with pytest.raises(NotFoundError, match="are missing"):
        resolve_model(str(parts[0]))


def test_experts_of_mixed_types_are_planned_for_by_their_bytes(tmp_path: Path) -> None:
    preset = load_preset("tiny-qwen3-moe")
    config = {**preset.config, "hidden_size": 256, "moe_intermediate_size": 256}
    config["quantization_config"] = {"quant_method": "gguf", "files": ["x"], "experts": [["Q4_K", "Q6_K"]] * 2}
    quantization = quantization_of(config)
    assert quantization is not None
    held = quantization.expert_format
    assert held.name == "int4k_g32+int6k_g16"
    block = 64 + 256 * 8 + 2 * (8 * 16) + 2 * 64, 64 + 256 * 12 + 16 * 16 + 64
    assert held.packed_bytes(256, 256) == -(-16 * (2 * block[0] + block[1]) // 3)


def test_linear_layers_stay_quantized_where_all_their_tensors_can(tmp_path: Path) -> None:
    model = make_model("tiny-qwen3-moe", tmp_path / "model", seed=3)
    write_gguf_model(model, tmp_path / "bf16.gguf")
    types = {"blk.0.attn_k.": "Q8_0", "blk.1.attn_q.": "Q5_0", "blk.1.attn_k.": "Q8_0", "blk.1.attn_v.": "Q4_0"}
    requantize(tmp_path / "bf16.gguf", tmp_path / "m.gguf", {**types, "attn_output.": "Q8_0", "output.": "MXFP4"})
    config = config_of(gguf_directory(tmp_path / "m.gguf"))
    layer = "model.layers.1.self_attn"
    wanted = {
        f"{layer}.q_proj": "Q5_0",
        f"{layer}.k_proj": "Q8_0",
        f"{layer}.v_proj": "Q4_0",
        f"{layer}.o_proj": "Q8_0",
    }
    wanted |= {f"model.layers.{other}.self_attn.o_proj": "Q8_0" for other in (0, 2)} | {"lm_head": "MXFP4"}
    assert packed_tensors(config) == {f"{name}.weight": kind for name, kind in wanted.items()}

    def dense_bytes(config: dict[str, Any], device: Literal["cpu", "gpu"]) -> int:
        needs = plan_memory(config, ServingShape(device)).needs
        return next(need.size_bytes for need in needs if need.what == "attention and dense weights")

    whole = dense_bytes({**config, "quantization_config": {**config["quantization_config"], "dense": {}}}, "cpu")
    shapes = {source.name: source.shape for source in family_for(config).twin_sources(config)}
    saved = sum(
        2 * rows * cols - packed_bytes(kind, rows, cols)
        for (rows, cols), kind in ((shapes[name], kind) for name, kind in packed_tensors(config).items())
    )
    assert dense_bytes(config, "cpu") == whole - saved < whole == dense_bytes(config, "gpu")
    config["quantization_config"]["dense"]["lm_head.weight"] = "Q2_K"
    with pytest.raises(CheckpointError, match=r"'dense' is .*; expected an object of Q8_0, Q4_0"):
        quantization_of(config)


@pytest.mark.parametrize(
    ("keys", "leave_out", "said"),
    [
        ({"llama.expert_count": 0}, "", "is a llama without experts; of this architecture Mixtral is served"),
        ({}, "blk.1.ffn_gate_exps.weight", "tensor 'blk.1.ffn_gate_exps.weight' is missing"),
        ({"llama.rope.dimension_count": 16}, "", "'head_dim' is 16; only 32 can be used"),
    ],
)
def test_a_llama_that_is_no_mixtral_is_refused(tmp_path: Path, keys: dict[str, Any], leave_out: str, said: str) -> None:
    model = make_model("tiny-mixtral", tmp_path / "model", seed=3)
    write_gguf_model(model, tmp_path / "bf16.gguf")
    requantize(tmp_path / "bf16.gguf", tmp_path / "m.gguf", {}, keys=keys, leave_out=leave_out)
    with pytest.raises((CheckpointError, InvalidValueError), match=said):
        resolve_model(str(tmp_path / "m.gguf"))


def test_a_llama_with_tensors_of_others_is_refused() -> None:
    keys = {"general.architecture": "llama", "llama.expert_count": 8}
    for name in ("rope_freqs.weight", "blk.0.attn_q.bias"):
        with pytest.raises(CheckpointError, match=f"m.gguf: has a tensor '{name}', which a Mixtral has not"):
            config_from_keys(keys, {name: (4,)}, "m.gguf")


def test_rows_of_mixtral_s_queries_and_keys_have_llama_cpp_s_order(tmp_path: Path) -> None:
    """Its rotary embedding turns adjacent elements: a head's rows are 0, size / 2, 1, size / 2 + 1, ..."""
    model = make_model("tiny-mixtral", tmp_path / "model", seed=3)
    write_gguf_model(model, tmp_path / "m.gguf")
    wanted = load_file(model / "model.safetensors")["model.layers.1.self_attn.k_proj.weight"].float()
    stored = next(
        tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors if tensor.name == "blk.1.attn_k.weight"
    )
    found = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy())
    heads, size = 2, wanted.shape[0] // 2
    for head in range(heads):
        for row in range(size):
            place = head * size + (2 * row if row < size // 2 else 2 * (row - size // 2) + 1)
            assert torch.equal(found[place], wanted[head * size + row])


def test_a_tensor_that_the_family_has_not_is_refused_and_layers_behind_the_last_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bias that nothing would add is refused; what multi-token prediction has is read past, with a line."""
    model = make_model("tiny-glm4-moe", tmp_path / "model", seed=3)
    write_gguf_model(model, tmp_path / "bf16.gguf")
    behind = {"blk.3.nextn.eh_proj.weight": (128, 256), "blk.3.ffn_up_exps.weight": (8, 64, 128)}
    path = tmp_path / "m.gguf"
    requantize(tmp_path / "bf16.gguf", path, {}, keys={"glm4moe.block_count": 4}, more=behind, layers_behind=1)
    config = resolve_model(str(path)).config
    assert config["num_hidden_layers"] == 3
    with caplog.at_level(logging.INFO):
        found = dict(gguf_tensors([path], config, torch.bfloat16))
    assert len(found) == len(family_for(config).twin_sources(config))
    assert "read past 2 tensors behind the last layer, such as blk.3.ffn_up_exps.weight: multi-token" in caplog.text
    for name in ("blk.1.attn_output.bias", "rope_freqs.weight"):
        requantize(tmp_path / "bf16.gguf", path, {}, more={name: (128,)})
        with pytest.raises(CheckpointError, match=f"m.gguf: tensor '{name}': a model of the family glm4_moe has no"):
            resolve_model(str(path))


@pytest.mark.parametrize("preset", ["tiny-glm4-moe", "tiny-minimax-m2"])
def test_a_router_that_is_no_sigmoid_is_refused(tmp_path: Path, preset: str) -> None:
    model = make_model(preset, tmp_path / "model", seed=3)
    write_gguf_model(model, tmp_path / "bf16.gguf")
    architecture = family_for(config_of(model)).gguf_architecture
    keys = {f"{architecture}.expert_gating_func": 1}
    requantize(tmp_path / "bf16.gguf", tmp_path / "m.gguf", {}, keys=keys)
    with pytest.raises(CheckpointError, match=r"expert_gating_func' is 1; expected 2 \(sigmoid\)"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_tensors_that_are_not_the_family_s_are_refused_by_name(made: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    layer = family_for(config_of(made[0])).moe_layers(config_of(made[0]))[0]
    requantize(made[1], path, {}, leave_out=f"blk.{layer}.ffn_up_exps.weight")
    with pytest.raises(CheckpointError, match=rf"m.gguf: tensor 'blk.{layer}.ffn_up_exps.weight' is missing"):
        resolve_model(str(path))
    architecture = gguf.GGUFReader(made[1]).fields["general.architecture"].contents()
    requantize(made[1], path, {}, keys={f"{architecture}.expert_count": 9})
    with pytest.raises(CheckpointError, match=r"has shape .*, expected"):
        resolve_model(str(path))
    requantize(made[1], path, {}, keys={f"{architecture}.block_count": 0})
    with pytest.raises((CheckpointError, InvalidValueError), match=r"num_hidden_layers|block_count"):
        resolve_model(str(path))


def test_what_no_family_serves_is_refused_by_name(made_one: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    requantize(made_one[1], path, {}, leave_out="output_norm.weight")
    with pytest.raises(CheckpointError, match=r"tensor 'output_norm.weight' is missing"):
        resolve_model(str(path))
    requantize(made_one[1], path, {"ffn_down_exps": "Q5_1"})
    with pytest.raises(CheckpointError, match="has type Q5_1; experts are served in BF16, Q8_0"):
        resolve_model(str(path))
    requantize(made_one[1], path, {}, keys={"general.architecture": "mamba"})
    with pytest.raises(CheckpointError, match="architecture of a GGUF file 'mamba'"):
        resolve_model(str(path))
    requantize(made_one[1], path, {}, keys={"tokenizer.ggml.pre": "klingon"})
    with pytest.raises(CheckpointError, match=r"pre-tokenizer 'klingon'.*beside the file"):
        resolve_model(str(path))
