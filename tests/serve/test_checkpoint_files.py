from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kt_runtime.errors import CheckpointError, InvalidValueError, UnknownNameError
from kt_runtime.serve import make_model as make_model_module
from kt_runtime.serve.checkpoint_files import check_checkpoint, read_header
from kt_runtime.serve.make_model import make_model

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


def edit_weights(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
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


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "fp8, e4m3, blocks of 128x128"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors, pack-quantized"),
        ({"bits": 4}, "unnamed method"),
    ],
)
def test_quantised_checkpoints_are_refused_with_their_format(checkpoint: Path, settings: object, named: str) -> None:
    edit_config(checkpoint, quantization_config=settings)
    assert f"quantised ({named}); this version uses bf16 checkpoints only" in refusal(checkpoint)


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
    assert f"{size_bytes - 1:,} bytes, but its header describes {size_bytes:,}" in refusal(checkpoint)


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
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
