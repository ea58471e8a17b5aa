"""Every LoRA layer of SGLang, and ours for routed experts, against merged weights, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kt_runtime.adapters import AdapterTensors
from kt_runtime.errors import ConflictError
from kt_runtime.families import LoraModule, family_for
from kt_runtime.sglang_patch.lora.install import drop_adapter, install_adapter

DENSE, EXPERTS, ABSORBED = 2e-6, 6.5e-6, 1.3e-6  # measured over 5,590 tokens: 2.1e-7, 8.1e-7, 1.3e-7
TOKENS = [3, 1, 4, 2]  # of the batch's requests


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def adapters(served: SimpleNamespace, manager: Any, reference: ModuleType) -> dict[str, AdapterTensors]:
    """Two ranks, and a scaling that is no power of two."""
    made = {
        "small": reference.random_adapter(served.config, rank=4, alpha=6.0, seed=1),
        "large": reference.random_adapter(served.config, rank=8, alpha=8.0, seed=2),
    }
    for name, adapter in made.items():
        install_adapter(manager, served.config, name, name, "content", adapter)
    return made


def prepare(manager: Any, lora_ids: Sequence[str | None], tokens: Sequence[int] = TOKENS) -> list[str | None]:
    """Gives SGLang a batch as its scheduler would; returns each token's adapter."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(
        lora_ids=list(lora_ids),
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lora_ids),
        extend_seq_lens=torch.tensor(tokens, dtype=torch.int32),
        extend_seq_lens_cpu=list(tokens),
        extend_num_tokens=sum(tokens),
    )
    manager.fetch_new_loras(set(lora_ids))
    manager.prepare_lora_batch(batch)
    return [lora_id for lora_id, count in zip(lora_ids, tokens, strict=True) for _ in range(count)]


def modules_by_source(served: SimpleNamespace) -> dict[str, list[LoraModule]]:
    grouped: dict[str, list[LoraModule]] = {}
    for module in family_for(served.config).lora_modules(served.config):
        grouped.setdefault(module.source, []).append(module)
    return grouped


def merged(weight: torch.Tensor, members: list[LoraModule], adapter: AdapterTensors | None) -> torch.Tensor:
    weight = weight.clone()
    for module in members:
        if adapter is not None and module.name in adapter.modules:
            pair = adapter.modules[module.name]
            weight[..., module.start : module.stop, :] += adapter.scaling * (pair.b @ pair.a)
    return weight


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (found - expected).norm() / expected.norm()
    assert error <= tolerance, f"relative error {error:.2e}"


def check_dense(served: SimpleNamespace, adapters: dict[str, AdapterTensors], lora_ids: Sequence[str | None]) -> None:
    owners = prepare(served.manager, lora_ids)
    for source, members in modules_by_source(served).items():
        if members[0].num_experts:
            continue
        layer = served.model.get_submodule(source)
        x = torch.randn(len(owners), members[0].in_features)
        found = layer(x)[0]
        for token, owner in enumerate(owners):
            weight = merged(layer.base_layer.weight, members, adapters.get(owner or ""))
            assert_close(found[token], weight @ x[token], DENSE)


def check_experts(served: SimpleNamespace, adapters: dict[str, AdapterTensors], lora_ids: Sequence[str | None]) -> None:
    owners = prepare(served.manager, lora_ids)
    for layer_id in family_for(served.config).moe_layers(served.config):
        x, topk = routed_input(served, len(owners))
        found = served.model.get_submodule(f"model.layers.{layer_id}.mlp.experts")(x, topk)
        for token, owner in enumerate(owners):
            expected = one_token(served, layer_id, x[token], topk, token, adapters.get(owner or ""))
            assert_close(found[token], expected, EXPERTS)


def routed_input(served: SimpleNamespace, tokens: int) -> tuple[torch.Tensor, Any]:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    family = family_for(served.config)
    experts, hidden, _ = family.expert_shape(served.config)
    per_token = family.num_experts_per_tok(served.config)
    ids = torch.stack([torch.randperm(experts)[:per_token] for _ in range(tokens)]).to(torch.int32)
    logits = torch.randn(tokens, experts)
    return torch.randn(tokens, hidden), StandardTopKOutput(torch.rand(tokens, per_token), ids, logits)


def one_token(
    served: SimpleNamespace, layer_id: int, x: torch.Tensor, topk: Any, token: int, adapter: AdapterTensors | None
) -> torch.Tensor:
    from kt_runtime.sglang_patch.store import expert_store

    total = torch.zeros_like(x)
    for expert, weight in zip(topk.topk_ids[token].tolist(), topk.topk_weights[token], strict=True):
        plain = expert_store().layers[layer_id].unpacked(expert)
        gate, up, down = (
            expert_weight(base.float(), f"model.layers.{layer_id}.mlp.experts.{name}", expert, adapter)
            for name, base in zip(("gate_proj", "up_proj", "down_proj"), plain, strict=True)
        )
        total += weight * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x)))
    return total


def expert_weight(base: torch.Tensor, module: str, expert: int, adapter: AdapterTensors | None) -> torch.Tensor:
    if adapter is None or module not in adapter.modules:
        return base
    pair = adapter.modules[module]
    return base + adapter.scaling * (pair.b[expert] @ pair.a[expert])


@pytest.mark.parametrize("lora_ids", [["small"] * 4, ["large", None, "small", "large"], [None] * 4])
def test_every_dense_linear_gives_what_merged_weights_give(
    served: SimpleNamespace, adapters: dict[str, AdapterTensors], lora_ids: list[str | None]
) -> None:
    check_dense(served, adapters, lora_ids)


@pytest.mark.parametrize("lora_ids", [["small"] * 4, ["large", None, "small", "large"], [None] * 4])
def test_routed_experts_give_what_merged_weights_give(
    served: SimpleNamespace, adapters: dict[str, AdapterTensors], lora_ids: list[str | None]
) -> None:
    check_experts(served, adapters, lora_ids)


def test_absorbed_attention_gives_what_a_merged_kv_b_gives(
    served: SimpleNamespace, adapters: dict[str, AdapterTensors]
) -> None:
    from sglang.srt.lora import deepseek_mla_correction

    if "kv_lora_rank" not in served.config:
        assert not any("kv_b_proj" in source for source in modules_by_source(served))
        return
    owners = prepare(served.manager, ["large", None, "small", "large"])
    for layer_id in range(served.config["num_hidden_layers"]):
        source = f"model.layers.{layer_id}.self_attn.kv_b_proj"
        attention = served.model.get_submodule(source.rpartition(".")[0])
        heads, nope = attention.num_local_heads, attention.qk_nope_head_dim
        query = torch.randn(len(owners), heads, nope)
        latent = torch.randn(len(owners), heads, attention.kv_lora_rank)
        absorbed = torch.bmm(query.transpose(0, 1), attention.w_kc).transpose(0, 1)
        output = torch.bmm(latent.transpose(0, 1), attention.w_vc).transpose(0, 1).flatten(1, 2).contiguous()
        deepseek_mla_correction.apply_q_correction(attention, query, absorbed)
        deepseek_mla_correction.apply_v_correction(attention, latent, output)
        for token, owner in enumerate(owners):
            base = attention.kv_b_proj.base_layer.weight
            weight = merged(base, modules_by_source(served)[source], adapters.get(owner or ""))
            key, value = weight.unflatten(0, (heads, -1)).split([nope, attention.v_head_dim], dim=1)
            assert_close(absorbed[token], torch.einsum("nk,nkd->nd", query[token], key), ABSORBED)
            assert_close(output[token], torch.einsum("nd,nvd->nv", latent[token], value).flatten(), ABSORBED)


@pytest.mark.slow
def test_what_an_adapter_leaves_out_is_the_base_also_in_a_used_slot(
    served: SimpleNamespace, manager: Any, adapters: dict[str, AdapterTensors], reference: ModuleType
) -> None:
    modules = family_for(served.config).lora_modules(served.config)
    parts = dict.fromkeys(name for module in modules for name in (module.group, module.projection))
    prepare(manager, ["large", "small", None, None])
    for only in parts:
        for name in list(manager.loras):
            drop_adapter(manager, name)
        partial = reference.random_adapter(served.config, rank=2, alpha=4.0, seed=3, only=[only])
        install_adapter(manager, served.config, only, only, "content", partial)
        check_dense(served, {only: partial}, [only, None, only, only])
        check_experts(served, {only: partial}, [only, None, only, only])


def test_more_adapters_than_slots_take_turns(served: SimpleNamespace, manager: Any, reference: ModuleType) -> None:
    made = {
        f"a{i}": reference.random_adapter(served.config, rank=2 + i, alpha=4.0, seed=i, only=["o_proj", "experts"])
        for i in range(5)
    }
    for name, adapter in made.items():
        install_adapter(manager, served.config, name, name, "content", adapter)
    for lora_ids in (["a0", "a1", "a2", None], ["a3", "a4", "a3", None], ["a0", "a4", "a2", "a1"], [None] * 4):
        check_dense(served, made, lora_ids)
        check_experts(served, made, lora_ids)


def test_sglangs_own_adapter_class_gives_the_same(
    served: SimpleNamespace, manager: Any, adapters: dict[str, AdapterTensors]
) -> None:
    from sglang.srt.lora.lora_registry import LoRARef

    adapter = adapters["large"]
    result = manager.load_lora_adapter_from_tensors(
        LoRARef(lora_id="stock", lora_name="stock", lora_path="tensors", pinned=False),
        dict(adapter.tensors),
        {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": adapter.targets},
    )
    assert result.success, result.error_message
    check_dense(served, {**adapters, "stock": adapter}, ["stock", "small", None, "stock"])
    check_experts(served, {**adapters, "stock": adapter}, ["stock", "small", None, "stock"])


def test_a_batch_of_another_length_than_prepared_is_refused(
    served: SimpleNamespace, adapters: dict[str, AdapterTensors]
) -> None:
    owners = prepare(served.manager, ["small", None, "large", None])
    layer = family_for(served.config).moe_layers(served.config)[0]
    x, topk = routed_input(served, len(owners) + 1)
    with pytest.raises(ConflictError, match="the batch has 11 tokens, but LoRA was prepared for 10"):
        served.model.get_submodule(f"model.layers.{layer}.mlp.experts")(x, topk)


def test_the_expert_layer_answers_for_the_layer_that_it_wraps(served: SimpleNamespace) -> None:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layer = family_for(served.config).moe_layers(served.config)[0]
    experts = served.model.get_submodule(f"model.layers.{layer}.mlp.experts")
    assert isinstance(experts.base_layer, FusedMoE)
    assert experts.moe_runner_config is experts.base_layer.moe_runner_config
    with pytest.raises(AttributeError, match="no_such_attribute"):
        _ = experts.no_such_attribute
