from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.checkpoints.quantized_checkpoint import quantize_checkpoint
from reference.quantized import SCHEMES
from safetensors.torch import load_file, save_file

from kt_runtime.checkpoint_file import read_header
from kt_runtime.errors import CheckpointError, InvalidValueError, UnknownNameError
from kt_runtime.serve.models import make_model as make_model_module
from kt_runtime.serve.models.checkpoint_files import check_checkpoint
from kt_runtime.serve.models.make_model import make_model

EXPERT = "model.layers.1.mlp.experts.0.up_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("tiny-deepseek-v3", tmp_path_factory.mktemp("made") / "m")


@pytest.fixture
def checkpoint(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "m"))


@pytest.fixture
def sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(make_model_module, "SHARD_BYTES", 700_000)
    return make_model("tiny-deepseek-v3", tmp_path / "sharded")


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(
    directory: Path, edit: Callable[[dict[str, torch.Tensor]], object], shard: str = "model.safetensors"
) -> None:
    path = directory / shard
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def refusal(directory: Path, error: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        check_checkpoint(directory)
    return str(caught.value)


def test_a_made_checkpoint_passes_in_one_file_and_in_shards(checkpoint: Path, sharded: Path) -> None:
    assert check_checkpoint(checkpoint) == check_checkpoint(sharded)
    assert check_checkpoint(checkpoint)["model_type"] == "deepseek_v3"


def test_tensors_beyond_the_configs_are_allowed(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(4, 8).bfloat16()}))
    check_checkpoint(checkpoint)


def test_a_directory_without_config_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    assert "no config.json there" in refusal(checkpoint)
    (checkpoint / "config.json").write_text("[1]")
    assert "holds a list, expected an object" in refusal(checkpoint)
    (checkpoint / "config.json").write_text("{")
    assert "config.json: not JSON" in refusal(checkpoint)


def test_an_unknown_family_is_refused_by_name(checkpoint: Path) -> None:
    edit_config(checkpoint, architectures=["LlamaForCausalLM"], model_type="llama")
    assert "unknown model family 'LlamaForCausalLM'" in refusal(checkpoint, UnknownNameError)


def test_a_variant_that_training_would_compute_differently_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, hidden_act="gelu")
    assert "hidden_act" in refusal(checkpoint, InvalidValueError)


@pytest.mark.parametrize("scheme", ["fp8", "int4_g32", "int8", "gptq_int4_g32", "awq_g32"])
@pytest.mark.parametrize("experts_only", [True, False])
def test_quantized_checkpoints_pass_whatever_part_of_them_is(
    made: Path, tmp_path: Path, scheme: str, experts_only: bool
) -> None:
    directory, _ = quantize_checkpoint(made, tmp_path, scheme, experts_only=experts_only)
    assert check_checkpoint(directory)["quantization_config"]["quant_method"]


@pytest.mark.parametrize("method", ["bitsandbytes", "fp9"])
def test_an_unknown_quantization_is_refused_by_name_with_the_known_ones(checkpoint: Path, method: str) -> None:
    edit_config(checkpoint, quantization_config={"quant_method": method})
    message = refusal(checkpoint, UnknownNameError)
    assert f"unknown quant_method '{method}'" in message and "awq, compressed-tensors, fp8, gptq" in message


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quant_model_description.json"])
def test_quantization_that_only_another_file_declares_is_refused(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text("{}")
    assert f"{name}: the weights are quantized in a way that config.json does not say" in refusal(checkpoint)


def test_nvfp4_that_only_the_other_file_declares_is_refused_with_what_to_write(checkpoint: Path) -> None:
    (checkpoint / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert '"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}' in refusal(checkpoint)


@pytest.mark.parametrize("scheme", ["nvfp4_modelopt", "nvfp4", "mxfp8", "mxfp8_method"])
def test_small_floats_are_checked_with_their_scales(made: Path, tmp_path: Path, scheme: str) -> None:
    directory, _ = quantize_checkpoint(made, tmp_path, scheme)
    check_checkpoint(directory)
    shard = "model-00002-of-00002.safetensors"
    if scheme == "nvfp4_modelopt":  # a single number with a dimension, too
        edit_weights(directory, lambda tensors: tensors.update({EXPERT + "_scale_2": torch.ones(1)}), shard)
        check_checkpoint(directory)
    scale = EXPERT + ("_scale_inv" if scheme == "mxfp8_method" else "_scale")
    edit_weights(directory, lambda tensors: tensors.update({scale: tensors[scale][:, :1].contiguous()}), shard)
    assert f"{shard}: '{scale}' has shape" in refusal(directory)


def test_scales_of_awq_beside_nvfp4_are_refused(made: Path, tmp_path: Path) -> None:
    directory, _ = quantize_checkpoint(made, tmp_path, "nvfp4_modelopt")
    other, shard = EXPERT.replace("weight", "pre_quant_scale"), "model-00002-of-00002.safetensors"
    edit_weights(directory, lambda tensors: tensors.update({other: torch.ones(128)}), shard)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"][other] = shard
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{other}' is there; by config.json the matrix is stored as weight, weight_scale" in refusal(directory)


def test_a_quantized_matrix_without_its_scales_is_refused_by_name(made: Path, tmp_path: Path) -> None:
    directory, _ = quantize_checkpoint(made, tmp_path, "fp8")
    scale = EXPERT + "_scale_inv"
    edit_weights(directory, lambda tensors: tensors.pop(scale), "model-00002-of-00002.safetensors")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"].pop(scale)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"the weights lack {scale}" in refusal(directory)


def test_quantized_tensors_of_another_shape_or_type_are_refused(made: Path, tmp_path: Path) -> None:
    directory, _ = quantize_checkpoint(made, tmp_path, "int4_g32")
    edit_config(directory, quantization_config=SCHEMES["int4_g128"].config)
    assert "q_a_proj.weight_scale' has shape [64, 4], but by config.json [64, 1]" in refusal(directory)
    edit_config(directory, quantization_config=SCHEMES["int8_packed_g32_zp"].config)
    assert "weight_packed' has shape" in refusal(directory)
    edit_config(directory, quantization_config=SCHEMES["int4_g32"].config)
    shard = "model-00002-of-00002.safetensors"
    name = EXPERT + "_scale"
    edit_weights(directory, lambda tensors: tensors.update({name: tensors[name].double()}), shard)
    assert f"{shard}: '{name}' is F64; allowed: F32, BF16, F16" in refusal(directory)


def test_other_dtypes_are_refused_by_name(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.float8_e4m3fn)}))
    assert f"1 tensors are F8_E4M3, such as '{EXPERT}'" in refusal(checkpoint)


def test_a_missing_tokenizer_is_refused(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert "no tokenizer; looked for tokenizer.json" in refusal(checkpoint)


def test_weights_in_pickles_only_are_refused_by_name(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert "the weights are in pytorch_model.bin; only safetensors files are read" in refusal(checkpoint)
    (checkpoint / "pytorch_model.bin").unlink()
    assert "no weights; looked for model.safetensors" in refusal(checkpoint)


def test_a_truncated_file_is_refused_with_both_sizes(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    size_bytes = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size_bytes - 1)
    told = refusal(checkpoint)
    assert f"ends at byte {size_bytes}, the file has {size_bytes - 1}" in told and told.startswith(f"{path}: truncated")


@pytest.mark.parametrize(
    "content",
    [b"", b"123", b"\xff" * 64, (5).to_bytes(8, "little") + b"hello", (2).to_bytes(8, "little") + b"[]"]
    + [(len(text)).to_bytes(8, "little") + text for text in (b'{"a":1}', b'{"a":{"data_offsets":[0]}}')],
)
def test_what_is_no_safetensors_file_is_refused(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(checkpoint)


def test_missing_and_misshapen_tensors_are_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.update({EXPERT: tensors[EXPERT][:32].contiguous()}))
    assert f"'{EXPERT}' has shape [32, 128], but by config.json [64, 128]" in refusal(checkpoint)
    edit_weights(checkpoint, lambda tensors: tensors.pop(EXPERT))
    assert refusal(checkpoint).endswith(f"the weights lack {EXPERT}")


def test_missing_shards_are_counted_and_named(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    shards[1].unlink()
    assert f"1 of {len(shards)} weight files are missing: {shards[1].name}" in refusal(sharded)


def test_an_index_that_contradicts_its_files_is_refused(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = sorted(set(index["weight_map"].values()))
    index["weight_map"]["lm_head.weight"] = names[0]
    path.write_text(json.dumps(index))
    assert f"says that 'lm_head.weight' is in {names[0]}, but it is not there" in refusal(sharded)
    index["weight_map"]["lm_head.weight"] = "../outside.safetensors"
    path.write_text(json.dumps(index))
    assert "'../outside.safetensors' is not a plain file name" in refusal(sharded)
    path.write_text("{}")
    assert "no 'weight_map'" in refusal(sharded)


def test_headers_agree_with_the_safetensors_library(made: Path) -> None:
    header = read_header(made / "model.safetensors")
    tensors = load_file(made / "model.safetensors")
    assert {name: entry.shape for name, entry in header.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
