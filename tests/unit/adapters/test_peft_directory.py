"""Reading directories that somebody else made: broken ones are refused by name, good ones come out uniform."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kt_runtime.adapters import AdapterTensors, content_hash, read_peft_directory, write_peft_directory
from kt_runtime.adapters.tensors import ALIGNMENT
from kt_runtime.errors import AdapterError, ConflictError, InvalidValueError, NotFoundError

Write = Callable[..., Path]
O_PROJ = "model.layers.0.self_attn.o_proj"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
FUSED, GATE_A = "fused_expert_lora.safetensors", "layers.1.experts.gate_lora_a"


def read(model: Any, path: Path, max_rank: int = 8, **kwargs: Any) -> AdapterTensors:
    return read_peft_directory(path, model.family, model.config, max_rank, **kwargs)


def write(model: Any, path: Path, adapter: AdapterTensors, **kwargs: Any) -> None:
    write_peft_directory(path, adapter, model.family, model.config, max_rank=8, **kwargs)


@pytest.fixture
def good(tmp_path: Path, write_raw: Write, qwen: Any) -> Path:
    return write_raw(tmp_path / "adapter", qwen.adapter("o_proj").tensors)


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path, model: Any) -> None:
    adapter = model.adapter("all", rank=3, alpha=5.5)
    write(model, tmp_path / "a", adapter, base_model="tiny")
    again = read(model, tmp_path / "a", base_model="some/where/tiny")
    assert (again.rank, again.alpha, again.notes) == (3, 5.5, ())
    assert list(again.modules) == [module.name for module in model.family.lora_modules(model.config)]
    assert content_hash(again) == content_hash(adapter)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [CONFIG, TENSORS]


def test_an_adapter_of_a_file_is_in_memory_once(tmp_path: Path, model: Any) -> None:
    """One pair for each expert in the file, in any order, and nothing is copied to stack them. Not where PEFT fuses
    experts otherwise."""
    adapter = model.adapter("all", rank=3)
    write(model, tmp_path / "a", adapter)
    tensors = load_file(tmp_path / "a" / TENSORS)
    save_file(dict(sorted(tensors.items(), key=lambda item: item[0][::-1])), tmp_path / "a" / TENSORS)
    again = read(model, tmp_path / "a")
    storages = {each.untyped_storage().data_ptr(): each for pair in again.modules.values() for each in pair}
    num_bytes = sum(each.untyped_storage().nbytes() for each in storages.values())
    if model.family.peft_experts != "fused":
        assert len(storages) == 1 and num_bytes < adapter.num_bytes + ALIGNMENT * 2 * len(adapter.modules)
    assert content_hash(again) == content_hash(adapter)


def test_files_hold_one_pair_per_expert_and_the_settings_of_peft(tmp_path: Path, qwen: Any) -> None:
    write(qwen, tmp_path / "a", qwen.adapter("all"), dtype=torch.bfloat16)
    keys = load_file(tmp_path / "a" / TENSORS)
    key = "base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_B.weight"
    assert keys[key].shape == (32, 4)
    assert keys[key].dtype == torch.bfloat16
    settings = json.loads((tmp_path / "a" / CONFIG).read_text())
    expected = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False, "bias": "none"}
    assert settings.items() >= expected.items()
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(settings["target_modules"]) == projections


def test_extra_files_come_with_the_directory(tmp_path: Path, qwen: Any) -> None:
    write(qwen, tmp_path / "a", qwen.adapter("o_proj"), extra={"optimizer.safetensors": b"state"})
    assert (tmp_path / "a" / "optimizer.safetensors").read_bytes() == b"state"
    read(qwen, tmp_path / "a")
    for name in ("../x", CONFIG, ".x", "a/b", ""):
        with pytest.raises(InvalidValueError, match="extra file"):
            write(qwen, tmp_path / "b", qwen.adapter("o_proj"), extra={name: b""})
    assert not (tmp_path / "b").exists()


def test_an_existing_directory_is_replaced_only_on_demand(tmp_path: Path, qwen: Any) -> None:
    write(qwen, tmp_path / "a", qwen.adapter("o_proj", seed=0))
    with pytest.raises(ConflictError):
        write(qwen, tmp_path / "a", qwen.adapter("o_proj", seed=1))
    assert content_hash(read(qwen, tmp_path / "a")) == content_hash(qwen.adapter("o_proj", seed=0))
    write(qwen, tmp_path / "a", qwen.adapter("o_proj", seed=1), replace=lambda old, shown: None)
    assert content_hash(read(qwen, tmp_path / "a")) == content_hash(qwen.adapter("o_proj", seed=1))


def test_the_prefix_may_be_missing(tmp_path: Path, good: Path, qwen: Any) -> None:
    tensors = {key.removeprefix("base_model.model."): value for key, value in load_file(good / TENSORS).items()}
    save_file(tensors, good / TENSORS)
    assert content_hash(read(qwen, good)) == content_hash(qwen.adapter("o_proj"))


def test_other_files_and_checkpoint_folders_are_left_alone(good: Path, qwen: Any) -> None:
    for name in ("README.md", "tokenizer.json", "optimizer.pt", "training_args.bin"):
        (good / name).write_text("not read")
    (good / "checkpoint-10").mkdir()
    read(qwen, good)


def test_missing_members_of_fused_groups_are_filled_with_zeros(tmp_path: Path, model: Any, write_raw: Write) -> None:
    first = "q_proj" if "Qwen" in model.config["architectures"][0] else "kv_a_proj_with_mqa"
    adapter = read(model, write_raw(tmp_path / "a", model.adapter(first, "up_proj").tensors))
    sources = {module.source for module in model.family.lora_modules(model.config) if module.name in adapter.modules}
    members = {m.name for m in model.family.lora_modules(model.config) if m.source in sources}
    assert set(adapter.modules) == members
    for name, (a, b) in adapter.modules.items():
        assert bool(a.any()) == bool(b.any()) == name.endswith((first, "up_proj"))
    assert any("filled with zeros" in note for note in adapter.notes)


def test_experts_that_are_missing_are_zero(tmp_path: Path, qwen: Any, write_raw: Write) -> None:
    whole = qwen.adapter("down_proj").tensors
    some = {name: tensor for name, tensor in whole.items() if ".1.mlp.experts.2." in name}
    pair = read(qwen, write_raw(tmp_path / "a", some)).modules["model.layers.1.mlp.experts.down_proj"]
    name = "model.layers.1.mlp.experts.2.down_proj"
    assert torch.equal(pair.a[2], whole[f"{name}.lora_A.weight"])
    assert torch.equal(pair.b[2], whole[f"{name}.lora_B.weight"])
    assert not pair.a[[0, 1, 3]].any()
    assert not pair.b[[0, 1, 3]].any()


def test_an_adapter_of_another_base_model_gets_a_note(tmp_path: Path, qwen: Any, write_raw: Write) -> None:
    tensors = qwen.adapter("o_proj").tensors
    path = write_raw(tmp_path / "a", tensors, base_model_name_or_path="org/Llama-8B")
    (note,) = read(qwen, path, base_model="models/tiny-qwen").notes
    assert "'org/Llama-8B'" in note
    assert "'models/tiny-qwen'" in note
    assert read(qwen, path, base_model="/elsewhere/llama-8b/").notes == ()


def test_a_missing_directory_or_file_is_named(tmp_path: Path, good: Path, qwen: Any) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        read(qwen, tmp_path / "nowhere")
    (good / TENSORS).unlink()
    with pytest.raises(AdapterError, match=f"{TENSORS}: can't be opened: No such file"):
        read(qwen, good)
    (good / TENSORS).mkdir()
    with pytest.raises(AdapterError, match=f"{TENSORS}: is a directory"):
        read(qwen, good)
    (good / CONFIG).unlink()
    with pytest.raises(AdapterError, match=f"{CONFIG}: can't be opened: No such file"):
        read(qwen, good)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_model-00001-of-00002.safetensors"])
def test_pickles_and_shards_are_refused_by_name_even_beside_safetensors(good: Path, qwen: Any, name: str) -> None:
    (good / name).write_bytes(b"\x80\x04.")
    with pytest.raises(AdapterError, match=name.replace(".", r"\.")):
        read(qwen, good)


def test_an_index_of_shards_is_refused_by_name(good: Path, qwen: Any) -> None:
    (good / "adapter_model.safetensors.index.json").touch()
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors\.index\.json: .*save"):
        read(qwen, good)


def test_links_and_pipes_are_refused(tmp_path: Path, good: Path, qwen: Any) -> None:
    (tmp_path / "link").symlink_to(good)
    with pytest.raises(AdapterError, match="link: is a symbolic link"):
        read(qwen, tmp_path / "link")
    (good / TENSORS).rename(tmp_path / "elsewhere")
    (good / TENSORS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdapterError, match=f"'{TENSORS}' is a symbolic link"):
        read(qwen, good)
    (good / TENSORS).unlink()
    os.mkfifo(good / TENSORS)
    with pytest.raises(AdapterError, match=f"'{TENSORS}' is not a regular file"):
        read(qwen, good)


def test_truncated_and_oversized_files_are_refused(good: Path, qwen: Any) -> None:
    whole = (good / TENSORS).read_bytes()
    for size in (0, 4, 8, 40, len(whole) // 2, len(whole) - 1):
        (good / TENSORS).write_bytes(whole[:size])
        with pytest.raises(AdapterError, match=f"{TENSORS}: truncated"):
            read(qwen, good)
    os.truncate(good / TENSORS, 1 << 40)
    with pytest.raises(AdapterError, match="has 1099511627776 bytes; at most"):
        read(qwen, good)
    (good / TENSORS).write_bytes(whole)
    os.truncate(good / CONFIG, 1 << 30)
    with pytest.raises(AdapterError, match=f"{CONFIG}: has 1073741824 bytes; at most"):
        read(qwen, good)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{O_PROJ}.lora_B.weight": None}, f"'{O_PROJ}.lora_B.weight' is missing"),
        ({f"{O_PROJ}.lora_A.weight": None}, f"'{O_PROJ}.lora_A.weight' is missing"),
        ({f"{O_PROJ}.lora_A.weight": torch.zeros(4, 33)}, r"lora_A.weight' has shape \[4, 33\]; expected \[4, 48\]"),
        ({f"{O_PROJ}.lora_B.weight": torch.zeros(32, 5)}, r"lora_B.weight' has shape \[32, 5\]; expected \[32, 4\]"),
        ({f"{O_PROJ}.lora_A.weight": torch.zeros(4, 48).double()}, "o_proj.lora_A.weight' has dtype 'F64'"),
        ({f"{O_PROJ}.lora_A.weight": torch.full((4, 48), torch.nan)}, f"'{O_PROJ}.lora_A.weight' contains NaN or Inf"),
        ({f"{O_PROJ}.lora_B.weight": torch.full((32, 4), torch.inf)}, f"'{O_PROJ}.lora_B.weight' contains NaN or Inf"),
        ({"model.layers.0.self_attn.p_proj.lora_A.weight": torch.zeros(4, 4)}, "unknown key .*p_proj.*did you mean"),
        ({"model.layers.9.self_attn.o_proj.lora_A.weight": torch.zeros(4, 4)}, "unknown key .*layers.9.*did you mean"),
        ({f"{O_PROJ}.lora_C.weight": torch.zeros(1)}, "unknown key .*lora_C.weight': expected NAME.lora_A.weight"),
        ({f"{O_PROJ}.lora_magnitude_vector": torch.zeros(1)}, "unknown key .*DoRA"),
        ({"model.embed_tokens.lora_embedding_A": torch.zeros(1)}, "unknown key .*embeddings"),
        ({"lm_head.lora_A.weight": torch.zeros(4, 32)}, "unknown key .*lm_head.* never adapted"),
        ({"model.layers.0.mlp.gate.lora_A.weight": torch.zeros(4, 32)}, "unknown key .*gate.* never adapted"),
        ({"model.layers.0.mlp.experts.4.up_proj.lora_A.weight": torch.zeros(4, 32)}, "there is no expert 4.* 0 to 3"),
        ({"model.layers.0.mlp.experts.up_proj.lora_A.weight": torch.zeros(4, 4, 32)}, "one pair per expert"),
        ({"model.layers.0.mlp.experts.lora_A.weight": torch.zeros(16, 32)}, "fused form of experts"),
        ({"model.layers.0.mlp.experts.base_layer.lora_A.weight": torch.zeros(16, 32)}, "fused form of experts"),
    ],
)  # fmt: skip
def test_a_broken_tensor_is_refused_by_name(
    tmp_path: Path, qwen: Any, write_raw: Write, change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = {**qwen.adapter("o_proj").tensors, **change}
    path = write_raw(tmp_path / "a", {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(AdapterError, match=rf"{TENSORS}: .*{message}"):
        read(qwen, path)


def test_nan_in_one_expert_names_the_expert(tmp_path: Path, qwen: Any, write_raw: Write) -> None:
    tensors = qwen.adapter("down_proj").tensors
    tensors["model.layers.1.mlp.experts.2.down_proj.lora_A.weight"][1, 3] = torch.nan
    with pytest.raises(AdapterError, match=r"layers.1.mlp.experts.2.down_proj.lora_A.weight' contains NaN"):
        read(qwen, write_raw(tmp_path / "a", tensors))


def test_the_same_tensor_with_and_without_prefix_is_refused(good: Path, qwen: Any) -> None:
    tensors = load_file(good / TENSORS)
    save_file(tensors | {f"{O_PROJ}.lora_A.weight": torch.zeros(4, 48)}, good / TENSORS)
    with pytest.raises(AdapterError, match="are the same tensor, with and without prefix"):
        read(qwen, good)


def test_an_adapter_without_tensors_is_refused(tmp_path: Path, qwen: Any, write_raw: Write) -> None:
    with pytest.raises(AdapterError, match="has no LoRA tensors"):
        read(qwen, write_raw(tmp_path / "a", {}))


# KTransformers: dense parts as PEFT has them, routed experts in a file of their own.


@pytest.fixture
def kt(tmp_path: Path, model: Any, write_raw: Callable[..., Path]) -> tuple[Path, AdapterTensors]:
    """(directory, what it means): attention as PEFT names it, experts as kt-kernel does."""
    adapter = model.adapter("attention", "experts")
    dense = {name: tensor for name, tensor in adapter.tensors.items() if ".experts." not in name}
    fused = {}
    for name, pair in adapter.modules.items():
        if pair.is_stacked:
            _, _, layer, _, _, projection = name.split(".")
            for letter, tensor in zip("ab", pair, strict=True):
                key = f"layers.{layer}.experts.{projection.removesuffix('_proj')}_lora_{letter}"
                fused[key] = tensor.contiguous()
    path = write_raw(tmp_path / "kt", dense)
    save_file(fused, path / FUSED)
    (path / "kt_adapter_manifest.json").write_text("{}")
    return path, adapter


def test_both_files_are_one_adapter(kt: tuple[Path, AdapterTensors], model: Any) -> None:
    path, adapter = kt
    assert content_hash(read(model, path)) == content_hash(adapter)


def test_names_that_ktransformers_has_wrapped_are_understood(kt: tuple[Path, AdapterTensors], model: Any) -> None:
    path, adapter = kt
    wrapped = {name.replace("self_attn.", "self_attn.orig_module."): t for name, t in load_file(path / TENSORS).items()}
    save_file(wrapped, path / TENSORS)
    assert content_hash(read(model, path)) == content_hash(adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.1.experts.gate_lora_c": torch.zeros(4, 4, 32)}, f"{FUSED}: unknown key 'layers.1.experts.gate_lora"),
        ({"layers.7.experts.gate_lora_a": torch.zeros(4, 4, 32)}, "layer 7 of this model has no routed experts"),
        ({GATE_A: torch.zeros(3, 4, 32)}, r"shape \[3, 4, 32\]; expected three dimensions, the first of 4 experts"),
        ({GATE_A: torch.zeros(4, 32)}, r"shape \[4, 32\]; expected three dimensions"),
        ({GATE_A: torch.zeros(4, 5, 32)}, r"experts.0.gate_proj.lora_A.weight' has shape \[5, 32\]; expected \[4, 32"),
        ({GATE_A: None}, "experts.0.gate_proj.lora_A.weight' is missing"),
        ({GATE_A: torch.full((4, 4, 32), torch.inf)}, "experts.0.gate_proj.lora_A.weight' contains NaN or Inf"),
    ],
)
def test_a_broken_expert_file_is_refused_by_name(
    kt: tuple[Path, AdapterTensors], model: Any, change: dict[str, torch.Tensor | None], message: str
) -> None:
    path, _ = kt
    tensors: dict[str, Any] = {**load_file(path / FUSED), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / FUSED)
    with pytest.raises(AdapterError, match=message):
        read(model, path)


def test_the_same_expert_in_both_files_is_refused(kt: tuple[Path, AdapterTensors], model: Any) -> None:
    path, adapter = kt
    name = "model.layers.1.mlp.experts.2.up_proj.lora_A.weight"
    save_file({**load_file(path / TENSORS), f"base_model.model.{name}": adapter.tensors[name].clone()}, path / TENSORS)
    with pytest.raises(AdapterError, match=f"{re.escape(name)}' is in {TENSORS} too"):
        read(model, path)


def test_a_scaling_that_may_not_hold_for_the_experts_is_refused(
    tmp_path: Path, kt: tuple[Path, AdapterTensors], model: Any, write_raw: Callable[..., Path]
) -> None:
    path, _ = kt
    other = write_raw(tmp_path / "rs", load_file(path / TENSORS), use_rslora=True)
    (path / FUSED).rename(other / FUSED)
    with pytest.raises(AdapterError, match="use_rslora, rank_pattern or alpha_pattern"):
        read(model, other)
