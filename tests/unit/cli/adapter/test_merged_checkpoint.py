"""Merged checkpoints against transformers: the model that results is the base with the adapter added by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import lora
from reference.cases import choose
from reference.checkpoints.quantized_checkpoint import quantize_checkpoint
from reference.checkpoints.transformers_checkpoint import save
from reference.families import PRESETS
from reference.server.greedy import load_hugging_face
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from kt_runtime.adapters import AdapterTensors
from kt_runtime.cli.adapter import merged_checkpoint
from kt_runtime.cli.adapter.merged_checkpoint import write_merged
from kt_runtime.errors import CheckpointError, ConflictError
from kt_runtime.serve.models.checkpoint_files import check_checkpoint
from kt_runtime.serve.models.make_model import make_model

TOKENS = torch.arange(3, 43).reshape(2, 20)


class Base(SimpleNamespace):
    directory: Path
    config: dict[str, Any]
    adapter: AdapterTensors


@pytest.fixture(scope="module", params=["tiny-qwen3-moe", "tiny-deepseek-v3"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    directory = make_model(request.param, tmp_path_factory.mktemp(request.param) / "model", seed=4)
    config = json.loads((directory / "config.json").read_text())
    return Base(directory=directory, config=config, adapter=lora.random_adapter(config, rank=4, alpha=8.0, seed=3))


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def merged_by_hand(base: Path, adapter: AdapterTensors) -> torch.nn.Module:
    return lora.merge(load_hugging_face(base), adapter)


@pytest.mark.slow
def test_in_float32_the_logits_are_those_of_the_hand_merged_model(base: Base, tmp_path: Path) -> None:
    write_merged(base.directory, base.adapter, tmp_path / "out", dtype=torch.float32)
    expected = logits(merged_by_hand(base.directory, base.adapter))
    effect = (expected - logits(load_hugging_face(base.directory))).abs().max()
    error = (logits(load_hugging_face(tmp_path / "out")) - expected).abs().max()
    print(f"effect {effect:.3g}, difference {error:.2g}")
    assert effect > 0.5 and error < 1e-4
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


def test_in_bf16_every_weight_is_the_hand_merged_one_rounded_once(base: Base, tmp_path: Path) -> None:
    write_merged(base.directory, base.adapter, tmp_path / "out", shard_bytes=300_000)
    original, found = tensors(base.directory), tensors(tmp_path / "out")
    assert found.keys() == original.keys()
    adapted = {name.removesuffix(".lora_A.weight") for name in base.adapter.tensors if name.endswith("lora_A.weight")}
    for name, weight in original.items():
        assert found[name].dtype == weight.dtype
        module = name.removesuffix(".weight")
        if module not in adapted:
            assert torch.equal(found[name], weight), name
            continue
        a, b = (base.adapter.tensors[f"{module}.lora_{letter}.weight"].double() for letter in "AB")
        exact = weight.double() + base.adapter.scaling * (b @ a)
        assert torch.allclose(found[name].double(), exact, rtol=2.0**-8, atol=1e-7), name
        assert (found[name] != exact.bfloat16()).double().mean() < 1e-3
    check_checkpoint(tmp_path / "out")


WRITTEN = [
    *(("glm4_moe", True), ("mixtral", False), ("mixtral", True), ("gpt_oss", True), ("llama4_text", True)),
    *(("qwen3_next", False), ("qwen3_next", True), ("qwen3_5_moe_text", True)),
    *(("deepseek_v32", False), ("glm_moe_dsa", False), ("glm_moe_dsa", True)),
]
FEW_WRITTEN = [("gpt_oss", True), ("qwen3_next", False)]


@pytest.mark.parametrize("only", [(), ("experts",)])
@pytest.mark.parametrize(("family", "fused"), choose(few=FEW_WRITTEN, usual=WRITTEN, every=WRITTEN))
def test_what_transformers_wrote_is_merged_under_the_names_that_it_has(
    tmp_path: Path, family: str, fused: bool, only: tuple[str, ...]
) -> None:
    base = save(PRESETS[family], tmp_path / "base", torch.float32, fused=fused, seed=4)
    config = json.loads((base / "config.json").read_text())
    adapter = lora.random_adapter(config, rank=4, alpha=8.0, seed=3, only=only)
    write_merged(base, adapter, tmp_path / "out")
    before, after = tensors(base), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed and (not only or all(".experts." in name for name in changed))
    expected = logits(merged_by_hand(base, adapter))
    assert (expected - logits(load_hugging_face(base))).abs().max() > 0.05
    assert (logits(load_hugging_face(tmp_path / "out")) - expected).abs().max() < 1e-4
    check_checkpoint(tmp_path / "out")


def test_shards_keep_to_their_size_and_are_what_the_index_says(base: Base, tmp_path: Path) -> None:
    total_bytes = write_merged(base.directory, base.adapter, tmp_path / "out", shard_bytes=300_000)
    shards = sorted(tmp_path.glob("out/*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(shards) > 2 and set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert shards[-1].name == f"model-{len(shards):05}-of-{len(shards):05}.safetensors"
    sizes = {shard.name: sum(tensor.nbytes for tensor in load_file(shard).values()) for shard in shards}
    assert sum(sizes.values()) == index["metadata"]["total_size"] == total_bytes
    assert all(size <= 300_000 or len(load_file(tmp_path / "out" / name)) == 1 for name, size in sizes.items())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        assert (tmp_path / "out" / name).exists() == (base.directory / name).exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("hello").input_ids


QUANTIZED = [
    ("tiny-deepseek-v3", "fp8", False),
    ("tiny-deepseek-v3", "int4_g32", True),
    ("tiny-qwen3-moe", "gptq_int4_g32", False),
    ("tiny-qwen3-moe", "awq_g32", False),
    ("tiny-qwen3-moe", "int8", False),
    ("tiny-qwen3-moe", "int8_packed_g32_zp", False),
]


@pytest.mark.parametrize(
    ("preset", "scheme", "experts_only"), choose(few=QUANTIZED[:1], usual=QUANTIZED, every=QUANTIZED)
)
def test_a_quantized_base_becomes_a_plain_one_with_the_adapter_in_it(
    tmp_path: Path, preset: str, scheme: str, experts_only: bool
) -> None:
    bf16 = make_model(preset, tmp_path / "bf16", seed=4)
    quantized, plain = quantize_checkpoint(bf16, tmp_path, scheme, experts_only=experts_only)
    adapter = lora.random_adapter(json.loads((plain / "config.json").read_text()), rank=4, alpha=8.0, seed=3)
    write_merged(quantized, adapter, tmp_path / "out", dtype=torch.float32)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    expected = logits(merged_by_hand(plain, adapter))
    assert (logits(load_hugging_face(tmp_path / "out")) - expected).abs().max() < 1e-4  # 1.7e-5 measured
    write_merged(quantized, adapter, tmp_path / "out16")
    exact, rounded = tensors(tmp_path / "out"), tensors(tmp_path / "out16")
    for name, tensor in rounded.items():
        assert (tensor != exact[name].to(tensor.dtype)).double().mean() < 1e-3, name
    check_checkpoint(tmp_path / "out16")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Base]:
    directory = make_model("tiny-qwen3-moe", tmp_path / "small", seed=4)
    config = json.loads((directory / "config.json").read_text())
    adapter = lora.random_adapter(config, rank=2, alpha=4.0, seed=3, only=["o_proj"])
    yield Base(directory=directory, config=config, adapter=adapter)
    assert {entry.name for entry in tmp_path.iterdir()} <= {"small", "out"}  # nothing temporary is left behind


@pytest.mark.slow
def test_what_a_quantized_base_has_in_float16_becomes_bf16_and_can_be_served(tmp_path: Path) -> None:
    bf16 = make_model("tiny-qwen3-moe", tmp_path / "bf16", seed=4)
    base, plain = quantize_checkpoint(bf16, tmp_path, "awq_g32", experts_only=True)
    for file in base.glob("*.safetensors"):
        halves = {name: t.half() if t.dtype == torch.bfloat16 else t for name, t in load_file(file).items()}
        save_file(halves, file, metadata={"format": "pt"})
    adapter = lora.random_adapter(json.loads((plain / "config.json").read_text()), rank=2, alpha=4.0, seed=3)
    adapter.modules["model.layers.1.self_attn.o_proj"].b.fill_(1e7)  # beyond float16
    write_merged(base, adapter, tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    check_checkpoint(tmp_path / "out")


def test_links_of_a_hub_cache_are_followed(
    small: Base, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    for entry in small.directory.iterdir():
        (cache / entry.name).symlink_to(entry)
    write_merged(cache, small.adapter, tmp_path / "out")
    assert not any(entry.is_symlink() for entry in (tmp_path / "out").iterdir())
    check_checkpoint(tmp_path / "out")


def test_what_exists_is_not_touched(small: Base, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConflictError, match="out exists already"):
        write_merged(small.directory, small.adapter, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_written(
    small: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(ConflictError, match=r"the checkpoint takes .*, the disk has .* free"):
        write_merged(small.directory, small.adapter, tmp_path / "out")


def test_an_interruption_leaves_nothing(small: Base, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_merged(small.directory, small.adapter, tmp_path / "out", progress=interrupt)
    assert not (tmp_path / "out").exists()


def test_a_broken_base_is_named(small: Base, tmp_path: Path) -> None:
    shard = small.directory / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        write_merged(small.directory, small.adapter, tmp_path / "out")


def test_one_matrix_is_in_memory_at_a_time(small: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    real = merged_checkpoint.plain_tensors

    def counted(*arguments: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in real(*arguments, **options):
            alive.append(tensor.nbytes)
            yield name, tensor

    monkeypatch.setattr(merged_checkpoint, "plain_tensors", counted)
    written: list[int] = []
    write_merged(small.directory, small.adapter, tmp_path / "out", progress=lambda done, _: written.append(len(alive)))
    assert written == list(range(1, len(alive) + 1))  # each is written before the next one is read
