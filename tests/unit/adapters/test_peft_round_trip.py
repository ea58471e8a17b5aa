"""Against PEFT 0.21 itself, on tiny Hugging Face models in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from reference.cases import choose
from reference.delta_net import hugging_face_in_float64
from torch import nn

from kt_runtime.adapters import AdapterTensors, content_hash, read_peft_directory, readers, write_peft_directory
from kt_runtime.errors import AdapterError

# PEFT applies patterns to the parameters that hold experts, and then says that they match no module.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Found missing adapter keys while loading the checkpoint:UserWarning"),
]
DENSE = {
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"],
}
Deltas = dict[str, torch.Tensor]


def random_peft_model(model: Any, **settings: Any) -> Any:
    wrapped = peft.get_peft_model(model.build(), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return wrapped


def peft_deltas(wrapped: Any) -> Deltas:
    """What PEFT adds to each weight, by module name."""
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default")
        for name, module in wrapped.named_modules()
        if isinstance(module, peft.tuners.lora.Linear)
    }


def our_deltas(adapter: AdapterTensors) -> Deltas:
    return {name: adapter.scaling * pair.b @ pair.a for name, pair in adapter.modules.items()}


def read(model: Any, path: Path) -> AdapterTensors:
    return read_peft_directory(path, model.family, model.config, max_rank=8)


def assert_same(ours: Deltas, theirs: Deltas, tolerance: float) -> None:
    for name, delta in ours.items():
        expected = theirs.get(name, torch.zeros_like(delta))
        torch.testing.assert_close(delta, expected, rtol=tolerance, atol=tolerance)
    assert ours.keys() >= theirs.keys()


def merge(model: nn.Module, adapter: AdapterTensors) -> None:
    """Adds the adapter to the weights by hand, routed experts into transformers' fused parameters."""
    for name, (a, b) in adapter.modules.items():
        delta = adapter.scaling * torch.matmul(b, a)
        if a.dim() == 2:
            cast(nn.Linear, model.get_submodule(name)).weight.data += delta
            continue
        experts: Any = model.get_submodule(name.rpartition(".")[0])
        if hasattr(experts, "down_proj_bias"):  # gpt-oss: interleaved and transposed
            place = slice(int(name.endswith("up_proj")), None, 2)
            is_down = name.endswith("down_proj")
            (experts.down_proj.data if is_down else experts.gate_up_proj.data[..., place]).add_(delta.mT)
        elif name.endswith("down_proj"):
            experts.down_proj.data += delta
        else:
            half = experts.gate_up_proj.shape[1] // 2
            rows = slice(0, half) if name.endswith("gate_proj") else slice(half, None)
            experts.gate_up_proj.data[:, rows] += delta


def test_a_plain_adapter_made_by_peft_loads_as_it_is(tmp_path: Path, model: Any) -> None:
    targets = DENSE[model.family.name]
    wrapped = random_peft_model(model, r=4, lora_alpha=16, target_modules=targets, lora_dropout=0.1)
    wrapped.save_pretrained(tmp_path / "a")
    adapter = read(model, tmp_path / "a")
    assert (adapter.rank, adapter.alpha, adapter.targets) == (4, 16.0, sorted(targets))
    assert adapter.notes == ()
    assert_same(our_deltas(adapter), peft_deltas(wrapped), 0)


def test_patterns_that_contradict_each_other_are_refused(tmp_path: Path, qwen: Any) -> None:
    # PEFT takes the first, and sorts them when it saves: the file does not say which one was trained with.
    patterns = {"o_proj": 8, r"layers\.1\.self_attn\..*_proj": 2}
    for key in ("rank_pattern", "alpha_pattern"):
        settings = {"r": 4, "target_modules": ["o_proj"], key: patterns}
        random_peft_model(qwen, **settings).save_pretrained(tmp_path / key)
        with pytest.raises(AdapterError, match=rf"{key}: several patterns match 'model.layers.1.self_attn.o_proj'"):
            read(qwen, tmp_path / key)


def test_every_second_group_member_alone_loads_completed(tmp_path: Path, model: Any) -> None:
    wrapped = random_peft_model(model, r=4, lora_alpha=8, target_modules=DENSE[model.family.name][1::2])
    wrapped.save_pretrained(tmp_path / "a")
    assert_same(our_deltas(read(model, tmp_path / "a")), peft_deltas(wrapped), 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"rank_pattern": {"o_proj": 8, r"layers\.1\.self_attn\.[qkv]_proj": 2}},
        {"alpha_pattern": {"o_proj": 3, "layers.1.self_attn.q_proj": 40}},
        {"use_rslora": True, "rank_pattern": {"o_proj": 7}, "alpha_pattern": {"model.layers.0.self_attn.k_proj": 5}},
    ],
)
def test_rslora_and_patterns_are_folded_to_what_peft_computes(
    tmp_path: Path, qwen: Any, settings: dict[str, Any]
) -> None:
    wrapped = random_peft_model(qwen, r=4, lora_alpha=8, target_modules=DENSE["qwen3_moe"], **settings)
    wrapped.save_pretrained(tmp_path / "a")
    adapter = read(qwen, tmp_path / "a")
    assert adapter.notes
    assert_same(our_deltas(adapter), peft_deltas(wrapped), 2e-6)
    # What is served after it is written once more is the same: nothing is folded twice.
    write_peft_directory(tmp_path / "b", adapter, qwen.family, qwen.config, max_rank=8)
    again = read(qwen, tmp_path / "b")
    assert again.notes == ()
    assert content_hash(again) == content_hash(adapter)


def test_fused_experts_of_peft_are_refused_by_key(tmp_path: Path, qwen: Any) -> None:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    random_peft_model(qwen, r=4, target_modules=[], target_parameters=targets).save_pretrained(tmp_path / "a")
    with pytest.raises(AdapterError, match=r"target_parameters is .*one pair per expert"):
        read(qwen, tmp_path / "a")


def test_dora_of_peft_is_refused_by_key(tmp_path: Path, qwen: Any) -> None:
    random_peft_model(qwen, r=4, target_modules=["o_proj"], use_dora=True).save_pretrained(tmp_path / "a")
    with pytest.raises(AdapterError, match="use_dora"):
        read(qwen, tmp_path / "a")


WRITTEN = [
    ("qwen", ["all"]),
    ("deepseek", ["all"]),
    ("deepseek", ["attention"]),
    ("deepseek", ["attention", "experts"]),
    ("deepseek", ["mlp", "shared"]),
    ("deepseek_v2", ["all"]),
    ("deepseek_v2_lite", ["all"]),
    ("deepseek_v2_lite", ["q_proj"]),
    ("deepseek_v2_lite", ["kv_a_proj_with_mqa"]),
    ("mixtral", ["all"]),
    ("mixtral", ["experts"]),
    ("olmoe", ["all"]),
    ("glm4_moe", ["all"]),
    ("glm4_moe_lite", ["all"]),
    ("deepseek_v32", ["all"]),
    ("glm_moe_dsa", ["all"]),
    ("minimax_m2", ["all"]),
    ("gpt_oss", ["all"]),
    ("gpt_oss", ["experts"]),
    ("gpt_oss", ["attention"]),
    ("gpt_oss", ["down_proj"]),
    ("qwen3_next", ["all"]),
    ("qwen3_next", ["in_proj_qkvz", "experts"]),
    ("qwen3_next", ["in_proj_ba"]),
    ("qwen3_5_moe", ["all"]),
    ("qwen3_5_moe", ["in_proj_b", "in_proj_a", "experts"]),
    ("qwen3_5_moe", ["experts"]),
]
FEW = [
    *(("qwen", ["all"]), ("deepseek", ["all"]), ("deepseek_v2_lite", ["kv_a_proj_with_mqa"]), ("gpt_oss", ["all"])),
    *(("qwen3_next", ["in_proj_ba"]), ("qwen3_5_moe", ["all"])),
]


@pytest.mark.parametrize(("fixture", "targets"), choose(few=FEW, usual=WRITTEN, every=WRITTEN))
def test_peft_loads_all_that_we_write_and_gives_the_same_logits(
    tmp_path: Path, request: pytest.FixtureRequest, fixture: str, targets: list[str]
) -> None:
    model: Any = request.getfixturevalue(fixture)
    adapter = model.adapter(*targets, rank=4, alpha=8.0)
    write_peft_directory(tmp_path / "a", adapter, model.family, model.config, max_rank=8)
    tokens = torch.arange(2 * 12).reshape(2, 12) * 3 % model.config["vocab_size"]
    plain, merged = model.build(), model.build()
    merge(merged, adapter)
    with torch.no_grad(), hugging_face_in_float64():
        base, expected = plain(tokens).logits, merged(tokens).logits
        wrapped: Any = peft.PeftModel.from_pretrained(plain, str(tmp_path / "a"))
        found = wrapped(tokens).logits
        folded = wrapped.merge_and_unload()(tokens).logits
    effect = (expected - base).abs().max().item()
    error = (found - expected).abs().max().item()
    print(f"{fixture} {targets}: effect {effect:.3g}, PEFT's difference {error:.3g}")
    assert effect > 0.1
    assert error < 1e-5 * expected.abs().max().item()
    assert torch.equal(folded, expected)
    again = read(model, tmp_path / "a")
    assert content_hash(again) == content_hash(adapter) and again.notes == ()


class LinearExperts(nn.Module):
    """Llama 4's experts with a linear for each matrix, as programs that train it with PEFT replace them."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        for expert, (both, down) in enumerate(zip(fused.gate_up_proj.data.mT, fused.down_proj.data.mT, strict=True)):
            matrices = {"gate_proj": both.chunk(2)[0], "up_proj": both.chunk(2)[1], "down_proj": down}
            self.add_module(str(expert), nn.ModuleDict({name: _linear(matrix) for name, matrix in matrices.items()}))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = []
        for expert, rows in enumerate(hidden.chunk(len(self._modules))):
            one: Any = self.get_submodule(str(expert))
            parts.append(one["down_proj"](nn.functional.silu(one["gate_proj"](rows)) * one["up_proj"](rows)))
        return torch.cat(parts)


def _linear(matrix: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
    linear.weight.data.copy_(matrix)
    return linear


def with_linear_experts(model: Any) -> Any:
    for layer in model.model.layers:
        if layer.is_moe_layer:
            layer.feed_forward.experts = LinearExperts(layer.feed_forward.experts)
    return model


def test_peft_loads_llama_4_s_adapters_whole_where_each_expert_has_linears(tmp_path: Path, llama4: Any) -> None:
    """transformers' fused experts have none, and PEFT has no rule that fuses the pairs: `readers` says so."""
    adapter = llama4.adapter("all", rank=4, alpha=8.0)
    write_peft_directory(tmp_path / "a", adapter, llama4.family, llama4.config, max_rank=8)
    tokens = torch.arange(2 * 12).reshape(2, 12) * 3 % llama4.config["vocab_size"]
    merged, plain = with_linear_experts(llama4.build()), with_linear_experts(llama4.build())
    with torch.no_grad():
        base = plain(tokens).logits
        for name, pair in adapter.tensors.items():
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                b = adapter.tensors[f"{module}.lora_B.weight"]
                merged.get_submodule(module).weight += adapter.scaling * b @ pair
        expected = merged(tokens).logits
        found = peft.PeftModel.from_pretrained(plain, str(tmp_path / "a"))(tokens).logits
    assert (expected - base).abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    again = read(llama4, tmp_path / "a")
    assert content_hash(again) == content_hash(adapter) and again.notes == ()

    of_fused: Any = peft.PeftModel.from_pretrained(llama4.build(), str(tmp_path / "a"))
    loaded = sum(value.numel() for name, value in of_fused.named_parameters() if ".lora_" in name)
    said = readers(tmp_path / "a", llama4.config)[1]
    assert loaded == said.num_loaded < said.num_parameters and "it drops routed experts" in said.remark


def test_mixtral_s_files_have_the_names_of_its_checkpoints_and_patterns_match_them(
    tmp_path: Path, mixtral: Any, write_raw: Callable[..., Path]
) -> None:
    adapter = mixtral.adapter("experts", rank=4, alpha=8.0)
    write_peft_directory(tmp_path / "a", adapter, mixtral.family, mixtral.config, max_rank=8)
    settings = peft.PeftConfig.from_pretrained(str(tmp_path / "a"))
    assert isinstance(settings, peft.LoraConfig) and settings.target_modules == {"w1", "w2", "w3"}
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    stored = {}
    for key, tensor in adapter.tensors.items():
        for ours, theirs in names.items():
            if f".{ours}." in key:
                stored[key.replace(".mlp.", ".block_sparse_moe.").replace(f".{ours}.", f".{theirs}.")] = tensor
    for name, tensors in (("stored", stored), ("ours", adapter.tensors)):
        write_raw(tmp_path / name, tensors, r=4, lora_alpha=8)
        assert content_hash(read(mixtral, tmp_path / name)) == content_hash(adapter)
    write_raw(tmp_path / "pattern", stored, r=4, lora_alpha=8, alpha_pattern={"w3": 16})
    found = read(mixtral, tmp_path / "pattern")
    for name, delta in our_deltas(found).items():
        expected = our_deltas(adapter)[name] * (2 if name.endswith("up_proj") else 1)
        assert torch.equal(delta, expected)


@pytest.mark.parametrize("loader", ["PEFT's", "transformers'"])
def test_every_number_that_we_write_is_in_the_model_that_is_loaded(tmp_path: Path, deepseek: Any, loader: str) -> None:
    adapter = deepseek.adapter("all")
    write_peft_directory(tmp_path / "a", adapter, deepseek.family, deepseek.config, max_rank=8)
    wrapped = deepseek.build()
    if loader == "PEFT's":
        wrapped = peft.PeftModel.from_pretrained(wrapped, str(tmp_path / "a"))
    else:
        wrapped.load_adapter(str(tmp_path / "a"))
    # PEFT pads its fused experts with zeros; none of the random numbers is one.
    loaded = sum(int(value.count_nonzero()) for name, value in wrapped.named_parameters() if "lora_" in name)
    assert loaded == sum(tensor.numel() for tensor in adapter.tensors.values())


def test_a_checkpoint_with_modules_of_its_own_has_linears_only(tmp_path: Path, deepseek: Any) -> None:
    kimi = deepseek.config | {"model_type": "kimi_k2"}
    adapter = deepseek.adapter("all")
    write_peft_directory(tmp_path / "a", adapter, deepseek.family, kimi, max_rank=8)
    settings = peft.PeftConfig.from_pretrained(str(tmp_path / "a"))
    assert isinstance(settings, peft.LoraConfig)
    assert settings.target_parameters is None and settings.target_modules == set(adapter.targets)


def test_peft_reads_back_the_targets_that_we_write(tmp_path: Path, model: Any, write_raw: Callable[..., Path]) -> None:
    adapter = model.adapter("attention")
    write_peft_directory(tmp_path / "a", adapter, model.family, model.config, max_rank=8, base_model="tiny")
    settings = peft.PeftConfig.from_pretrained(str(tmp_path / "a"))
    assert isinstance(settings, peft.LoraConfig)
    assert (settings.r, settings.lora_alpha, settings.base_model_name_or_path) == (4, 8, "tiny")
    assert settings.target_modules == set(adapter.targets)
