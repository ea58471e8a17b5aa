"""What the native step is given of SGLang's LoRA pool and of a batch's adapters. Results: cpu/step/test_adapters.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kt_runtime.experts.step import NO_LORA, AdapterRows, ExpertAdapter
from kt_runtime.sglang_patch.lora import step
from kt_runtime.sglang_patch.lora.experts import ExpertBatch, SlotUse

SLOTS, RANK, LAYERS = 3, 4, 2
NAMES = ("qkv_proj", "o_proj", "gate_up_proj_moe", "down_proj_moe")


def manager(*names: str, **changes: Any) -> SimpleNamespace:
    """What the step reads of SGLang's manager, with the pool's buffers of `names`."""
    buffers = {
        factor: {name: [torch.zeros(SLOTS, place + 1, RANK) for _ in range(LAYERS)] for place, name in enumerate(names)}
        for factor in ("A_buffer", "B_buffer")
    }
    pool = SimpleNamespace(num_layer=LAYERS, max_loras_per_batch=SLOTS, max_lora_rank=RANK, **buffers)
    backend = SimpleNamespace(name="torch_native", get_batch_info=lambda: None)
    values = {"memory_pool": pool, "lora_backend": backend, "embed_tokens_module": None}
    return SimpleNamespace(**{**values, "experts_shared_outer_loras": False, **changes})


def test_the_step_reads_the_pool_s_own_buffers() -> None:
    given = manager(*NAMES)
    assert step.why_not(given) == ""
    lora = step.lora_pool(given)
    assert lora is not None and (lora.slots, lora.rank, len(lora.layers)) == (SLOTS, RANK, LAYERS)
    pool = given.memory_pool
    for index, layer in enumerate(lora.layers):
        assert layer.qkv_a is pool.A_buffer["qkv_proj"][index] and layer.qkv_b is pool.B_buffer["qkv_proj"][index]
        assert layer.out_a is pool.A_buffer["o_proj"][index] and layer.out_b is pool.B_buffer["o_proj"][index]
        assert layer.gate_up_a is pool.A_buffer["gate_up_proj_moe"][index]
        assert layer.gate_up_b is pool.B_buffer["gate_up_proj_moe"][index]
        assert layer.down_a is pool.A_buffer["down_proj_moe"][index]
        assert layer.down_b is pool.B_buffer["down_proj_moe"][index]


@pytest.mark.parametrize("front", [("fused_qkv_a_proj_with_mqa", "q_b_proj"), ("kv_a_proj_with_mqa", "q_proj")])
def test_the_step_reads_the_pool_of_latent_attention_and_of_dense_mlps(front: tuple[str, str]) -> None:
    names = {
        front[0]: "compress",
        front[1]: "query",
        "kv_b_proj": "kv_b",
        "gate_up_proj": "mlp_gate_up",
        "down_proj": "mlp_down",
    }
    given = manager(*names)
    lora, pool = step.lora_pool(given), given.memory_pool
    assert lora is not None
    for index, layer in enumerate(lora.layers):
        for name, ours in names.items():
            assert getattr(layer, f"{ours}_a") is pool.A_buffer[name][index]
            assert getattr(layer, f"{ours}_b") is pool.B_buffer[name][index]
        assert layer.out_a is None and layer.gate_up_a is None


@pytest.mark.parametrize("target", ["gate_up_proj_moe", "down_proj_moe"])
def test_half_of_the_experts_targets_adapts_no_experts_as_in_sglang(target: str) -> None:
    lora = step.lora_pool(manager("o_proj", target))
    assert lora is not None
    for layer in lora.layers:
        assert layer.out_a is not None and layer.qkv_a is None
        assert (layer.gate_up_a, layer.gate_up_b, layer.down_a, layer.down_b) == (None,) * 4


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "LoRA is off"),
        (manager(*NAMES, lora_backend=SimpleNamespace(name="triton")), "the LoRA backend is triton"),
        (manager(*NAMES, embed_tokens_module=object()), "LoRA adapts the embedding"),
        (manager(*NAMES, experts_shared_outer_loras=True), "the experts share factors of LoRA"),
        (manager(*NAMES, "lm_head", "in_proj"), "LoRA adapts in_proj, lm_head"),
    ],
)
def test_what_the_step_can_t_adapt_has_a_reason(given: Any, reason: str) -> None:
    assert step.why_not(given) == reason
    assert step.lora_pool(given) is None


def test_addresses_change_with_a_buffer_and_not_with_its_content() -> None:
    given = manager(*NAMES)
    before = step.addresses(given)
    assert len(set(before)) == 2 * len(NAMES) * LAYERS
    buffers = given.memory_pool.B_buffer["o_proj"]
    buffers[1].fill_(1.0)
    assert step.addresses(given) == before
    buffers[1], _kept = buffers[1].clone(), buffers[1]
    assert step.addresses(given) != before


def test_a_batch_s_adapters_are_those_that_sglang_prepared() -> None:
    token_slots = torch.tensor([0, 0, -1, 1], dtype=torch.int32)
    prepared = SimpleNamespace(
        weight_indices_cpu=torch.tensor([2, 0, 1]),
        seg_lens_cpu=torch.tensor([2, 1, 1]),
        lora_ranks_cpu=torch.tensor([0, 3, 4]),
        scalings_cpu=torch.tensor([0.0, 0.5, 2.0]),
    )
    routed = ExpertBatch((SlotUse(2, 4, 2.0), SlotUse(1, 3, 1.0)), token_slots)
    backend = SimpleNamespace(get_batch_info=lambda: prepared, expert_batch=routed)
    found = step.batch_lora(manager(*NAMES, lora_backend=backend))
    assert found.rows == [AdapterRows(0, 2, 2, 4, 2.0), AdapterRows(3, 1, 1, 3, 0.5)]
    assert found.experts == [ExpertAdapter(2, 4, 2.0), ExpertAdapter(1, 3, 1.0)]
    assert found.token_slots is token_slots


def test_without_a_prepared_batch_there_are_no_adapters() -> None:
    assert step.batch_lora(manager(*NAMES)) is NO_LORA
