from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.serve.models import make_model as module
from kt_runtime.serve.models.checkpoint import CheckpointTensor, checkpoint_tensors
from kt_runtime.serve.models.make_model import make_model, random_tensor, to_bf16
from kt_runtime.serve.models.presets import load_preset

TINY = ("tiny-deepseek-v3", "tiny-qwen3-moe")


@pytest.fixture(scope="module", params=TINY)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp("made") / request.param)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.randint(5, 768, (4, 24), generator=torch.Generator().manual_seed(7))
    return model(input_ids=tokens, use_cache=False).logits


def test_transformers_loads_every_tensor_without_remote_code(checkpoint: Path) -> None:
    assert AutoConfig.from_pretrained(checkpoint).model_type in ("deepseek_v3", "qwen3_moe")
    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, output_loading_info=True)
    info = loaded[1]
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_transformers_writes_the_same_names_and_values_back(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, torch.bfloat16)
    model.save_pretrained(tmp_path)
    ours, theirs = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(logits_of(load(tmp_path, torch.bfloat16)), logits_of(model))


def test_same_seed_gives_the_same_bytes_and_another_seed_other_weights(checkpoint: Path, tmp_path: Path) -> None:
    again = make_model(checkpoint.name, tmp_path / "again")
    other = make_model(checkpoint.name, tmp_path / "other", seed=1)
    assert digests(again) == digests(checkpoint)
    different = {name for name, digest in digests(other).items() if digest != digests(checkpoint)[name]}
    assert different == {"model.safetensors"}


def test_large_checkpoints_are_sharded_and_hold_the_same_model(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 500_000)
    sharded = make_model(checkpoint.name, tmp_path / "sharded")
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(shards) >= 4 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert torch.equal(logits_of(load(sharded)), logits_of(load(checkpoint)))


def test_greedy_answers_of_the_random_model_vary_and_margins_exceed_bf16_noise(checkpoint: Path) -> None:
    exact, rounded = logits_of(load(checkpoint)), logits_of(load(checkpoint, torch.bfloat16)).float()
    best, second = exact.topk(2).values.unbind(-1)
    assert (best - second).median() > 5 * (exact - rounded).abs().mean()
    assert (exact.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.9
    assert len(exact.argmax(-1).unique()) > 50


def test_all_experts_are_chosen_and_all_matter(checkpoint: Path) -> None:
    model = load(checkpoint)
    before = logits_of(model)
    chosen: Counter[int] = Counter()
    for name, part in model.named_modules():
        if name.endswith("mlp.experts"):
            part.register_forward_pre_hook(lambda _, inputs: chosen.update(inputs[1].flatten().tolist()))
    logits_of(model)
    assert set(chosen) == set(range(8))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp.experts" in name and name.endswith("down_proj"):
                parameter[3] = 0
    assert (logits_of(model) - before).abs().mean() > 0.1


def test_correction_bias_is_float32_and_not_zero(tmp_path: Path) -> None:
    weights = load_file(make_model("tiny-deepseek-v3", tmp_path / "m") / "model.safetensors")
    bias = weights["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32 and bias.abs().min() > 0
    assert {tensor.dtype for name, tensor in weights.items() if "bias" not in name} == {torch.bfloat16}


def test_bench_model_is_written_in_two_shards_of_at_most_two_gigabytes() -> None:
    tensors = list(checkpoint_tensors(load_preset("bench-qwen3-moe").config))
    sizes = [sum(tensor.size_bytes for tensor in shard) for shard in module._shards(tensors)]
    assert len(sizes) == 2 and max(sizes) <= module.SHARD_BYTES
    assert sum(sizes) == pytest.approx(2.48e9, rel=0.01)


def test_random_values_have_the_wanted_mean_and_deviation() -> None:
    matrix = CheckpointTensor("model.layers.0.self_attn.q_proj.weight", (512, 256))
    bits = random_tensor(matrix, 3).astype(np.uint32) << 16
    values = bits.view(np.float32)
    assert values.mean() == pytest.approx(0, abs=1e-3)
    assert values.std() == pytest.approx(256**-0.5, rel=0.01)
    norm = CheckpointTensor("model.norm.weight", (4096,), "F32")
    assert random_tensor(norm, 3).mean() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("preset", ["tiny-qwen3-next", "tiny-qwen3-5-moe-text", "tiny-qwen3-moe"])
def test_norms_multiply_by_about_one(tmp_path: Path, preset: str) -> None:
    """Hugging Face's modules, also where the weight is an offset from one: with 2, logits are so sharp that rounding
    chooses other experts and tokens."""
    model = AutoModelForCausalLM.from_pretrained(make_model(preset, tmp_path / "m"), dtype=torch.float32)
    norms = {name: part for name, part in model.named_modules() if name.endswith("norm")}
    assert len(norms) > 2 * model.config.num_hidden_layers
    for name, norm in norms.items():
        # That of Gated DeltaNet wants a gate besides, and has no offset.
        factors = norm.weight if "linear_attn" in name else norm(torch.ones(1, norm.weight.numel()))
        assert float(factors.detach().mean()) == pytest.approx(1, abs=0.1), name


def test_bf16_rounding_is_torchs() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0, 3.4e38], np.float32)
    values = np.concatenate([values, ties])
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(to_bf16(values), expected)


def test_presets_of_the_hub_and_bad_seeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"'Kimi-K2' has real weights, moonshotai/Kimi-K2-Instruct on the hub"):
        make_model("Kimi-K2", tmp_path / "m")
    with pytest.raises(InvalidValueError, match="seed is -1"):
        make_model("tiny-qwen3-moe", tmp_path / "m", seed=-1)


def test_an_existing_directory_is_kept_unless_replacing_is_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.mkdir()
    (target / "mine").touch()
    with pytest.raises(ConflictError, match="exists already"):
        make_model("tiny-qwen3-moe", target)
    with pytest.raises(ConflictError, match="it holds 'mine', which `models make` does not write"):
        make_model("tiny-qwen3-moe", target, replace=True)
    assert (target / "mine").exists()
    (target / "mine").rename(target / "model.safetensors")
    (target / "config.json").touch()
    make_model("tiny-qwen3-moe", target, replace=True)
    assert (target / "config.json").stat().st_size > 0


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(written_bytes: int, total_bytes: int) -> None:
        if written_bytes > total_bytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model("tiny-qwen3-moe", tmp_path / "m", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_loads_beside_the_model(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    config = AutoConfig.from_pretrained(checkpoint)
    assert len(tokenizer) == config.vocab_size
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (config.eos_token_id, config.pad_token_id)
