from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.families import family_for
from kt_runtime.serve.memory.plan import (
    ACTIVATIONS,
    GIB,
    TRAINER_BYTES,
    MemoryPlan,
    ServingShape,
    cached_numbers_per_token,
    check_fits,
    format_bytes,
    lora_parameters,
    plan_memory,
)
from kt_runtime.serve.models.checkpoint import count_parameters
from kt_runtime.serve.models.presets import load_preset

V3 = load_preset("DeepSeek-V3-bf16").config
QWEN = load_preset("Qwen3-30B-A3B").config
TINY = load_preset("tiny-qwen3-moe").config


def row(plan: MemoryPlan, what: str) -> int:
    return next(need.size_bytes for need in plan.needs if need.what.startswith(what))


def test_cache_per_token_is_latent_for_mla_and_keys_and_values_for_grouped_queries() -> None:
    assert cached_numbers_per_token(V3) == 61 * (512 + 64)
    assert cached_numbers_per_token(QWEN) == 48 * 2 * 4 * 128


def test_every_rank_has_the_latents_and_the_projections_that_make_them() -> None:
    one, two = (plan_memory(V3, ServingShape(ranks=ranks)) for ranks in (1, 2))
    cached, dense = "KV cache", "attention and dense weights"
    assert row(two, cached) == 2 * row(one, cached)
    assert row(two, dense) - row(one, dense) == 61 * 7168 * (1536 + 512 + 64) * 2
    hosts = plan_memory(V3, ServingShape(ranks=1, hosts=2))
    assert row(hosts, cached) == row(one, cached) and 2 * row(hosts, dense) == row(two, dense)
    one, two = (plan_memory(QWEN, ServingShape(ranks=ranks)) for ranks in (1, 2))
    assert row(two, cached) == row(one, cached) and row(two, dense) == row(one, dense)


def test_ranks_share_the_inputs_of_layers_and_hold_rows_that_they_exchange() -> None:
    of_one, two = (
        row(plan_memory(QWEN, ServingShape(ranks=ranks, training_tokens=512)), ACTIVATIONS) for ranks in (1, 2)
    )
    hidden, layers, top_k = (QWEN[key] for key in ("hidden_size", "num_hidden_layers", "num_experts_per_tok"))
    checkpoints, exchanged = 2 * 512 * hidden * layers, 2 * 4 * 512 * top_k * hidden
    assert two == 2 * of_one - checkpoints + exchanged


def test_experts_are_on_the_cpu_and_the_rest_on_the_gpu_when_there_is_one() -> None:
    plan = plan_memory(V3, ServingShape(device="gpu"))
    assert plan.devices() == ["cpu", "gpu"]
    assert row(plan, "routed experts") == pytest.approx(2 * 653.9e9, rel=1e-4)
    assert row(plan, "attention and dense") == pytest.approx(2 * 17.1e9, rel=0.01)
    experts = {need.what for need in plan.needs if need.device == "cpu"}
    assert "routed experts, packed" in experts and "KV cache" not in experts
    assert plan_memory(V3, ServingShape()).devices() == ["cpu"]


@pytest.mark.parametrize(
    ("preset", "bytes_a_weight"),
    [("DeepSeek-V3-bf16", 2), ("DeepSeek-V3", 1), ("Kimi-K2", 1), ("Kimi-K2-Thinking", 0.5625), ("gpt-oss-20b", 0.534)],
)
def test_experts_are_counted_in_the_checkpoints_format_and_the_rest_is_not(preset: str, bytes_a_weight: float) -> None:
    config = load_preset(preset).config
    plan = plan_memory(config, ServingShape())
    routed = count_parameters(config).routed
    assert row(plan, "routed experts") == pytest.approx(bytes_a_weight * routed, rel=5e-3)
    layers = len(family_for(config).moe_layers(config))
    assert row(plan, "one layer") == pytest.approx(bytes_a_weight * routed / layers, rel=5e-3)
    assert row(plan, "attention and dense") == 2 * count_parameters(config).dense


@pytest.mark.parametrize(("held", "bytes_a_weight"), [("int8", 1), ("int4", 0.5625)])
@pytest.mark.parametrize("preset", ["DeepSeek-V3-bf16", "DeepSeek-V3", "Qwen3-30B-A3B"])
def test_experts_quantized_while_loading_are_counted_so(preset: str, held: str, bytes_a_weight: float) -> None:
    config = load_preset(preset).config
    plan, plain = plan_memory(config, ServingShape(expert_format=held)), plan_memory(config, ServingShape())
    assert row(plan, "routed experts") == pytest.approx(bytes_a_weight * count_parameters(config).routed, rel=1e-2)
    assert row(plan, "one layer") == row(plain, "one layer")


def test_an_expert_format_that_cannot_be_is_refused() -> None:
    with pytest.raises(
        InvalidValueError, match=r"quantized to integers already.*4 bits, groups of 32.*leave the option"
    ):
        plan_memory(load_preset("Kimi-K2-Thinking").config, ServingShape(expert_format="int8"))
    with pytest.raises(UnknownNameError, match=r"unknown expert format 'int5'; did you mean 'int[48]'"):
        plan_memory(TINY, ServingShape(expert_format="int5"))


def test_needs_scale_with_what_is_asked_for() -> None:
    shape = ServingShape()
    plan, longer = plan_memory(QWEN, shape), plan_memory(QWEN, replace(shape, max_total_tokens=2 * 8192))
    assert row(longer, "KV cache") == 2 * row(plan, "KV cache") == 2 * 8192 * 48 * 2 * 4 * 128 * 2
    exact = plan_memory(QWEN, replace(shape, activation_bytes=4))
    assert row(exact, "attention") == 2 * row(plan, "attention")
    assert row(exact, "routed") == row(plan, "routed")


def test_lora_counts_are_those_of_the_adapted_matrices() -> None:
    shape = ServingShape(lora_slots=3, lora_rank=8, lora_targets=["q_proj"], training_sessions=2)
    q_proj = 3 * 8 * (128 + 4 * 32)
    assert lora_parameters(TINY, shape) == (3 * q_proj, 2 * 16 * q_proj)
    gate = 3 * 8 * 8 * (128 + 64)
    assert lora_parameters(TINY, replace(shape, lora_targets=["gate_proj"])) == (3 * gate, 2 * 16 * gate)


def test_without_adapters_and_training_nothing_is_reserved_for_them() -> None:
    plan = plan_memory(TINY, ServingShape(lora_slots=0, training_sessions=0))
    assert not [need.what for need in plan.needs if "LoRA" in need.what or "train" in need.what]


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="LoRA target 'kv_b_proj': this family can adapt down_proj, gate_proj"):
        plan_memory(TINY, ServingShape(lora_targets=["q_proj", "kv_b_proj"]))


def test_what_fits_passes() -> None:
    plan = plan_memory(TINY, ServingShape())
    check_fits(plan, {"cpu": plan.total_bytes("cpu")})


def test_what_can_never_fit_says_how_much_is_needed_and_there() -> None:
    plan = plan_memory(V3, ServingShape(device="gpu"), "DeepSeek-V3-bf16")
    with pytest.raises(InvalidValueError) as caught:
        check_fits(plan, {"cpu": 64 * GIB, "gpu": 80 * GIB})
    message = str(caught.value)
    assert "DeepSeek-V3-bf16 does not fit: it needs 1.2" in message and "TiB on the CPU and 64 GiB are free" in message
    assert "routed experts, packed 1.19 TiB" in message
    assert "choose a smaller model or a larger machine" in message


def test_what_could_fit_says_what_to_lower_on_that_device_only() -> None:
    plan = plan_memory(TINY, ServingShape(device="gpu", max_total_tokens=10**7), "tiny")
    with pytest.raises(InvalidValueError) as caught:
        check_fits(plan, {"cpu": 4 * GIB, "gpu": 2 * GIB})
    assert "on the GPU" in str(caught.value) and "on the CPU" not in str(caught.value)
    advice = str(caught.value).partition("; lower ")[2].split(" or ")
    assert advice == ["--max-total-tokens", "--microbatch-tokens", "--max-lora-rank", "--lora-slots"]


def test_a_job_s_trainer_is_counted_where_the_fine_tuning_api_is_on_and_can_be_switched_off() -> None:
    shape = ServingShape(device="gpu", runs_jobs=True)
    plan, without = plan_memory(TINY, shape), plan_memory(TINY, ServingShape(device="gpu"))
    assert plan.total_bytes("cpu") - without.total_bytes("cpu") == TRAINER_BYTES
    there = {"cpu": without.total_bytes("cpu"), "gpu": 80 * GIB}
    with pytest.raises(InvalidValueError, match=r"trainer .*; give --finetuning-dir off$"):
        check_fits(plan, there)
    with_routes = plan_memory(TINY, replace(shape, route_bytes=1))
    with pytest.raises(InvalidValueError, match=r"; lower --routing-replay, or give --finetuning-dir off$"):
        check_fits(with_routes, there)
    check_fits(without, there)


def test_a_device_that_is_missing_counts_as_empty() -> None:
    plan = plan_memory(TINY, ServingShape(device="gpu"))
    with pytest.raises(InvalidValueError, match="on the GPU and 0 B are free"):
        check_fits(plan, {"cpu": 4 * GIB})


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (1100 * 2**20, "1.07 GiB"), (2**50, "1.02e+03 TiB")],
)
def test_bytes_are_shown_with_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_the_rotary_tables_of_llama_4_grow_with_the_context() -> None:
    config = load_preset("Llama-4-Scout").config

    def tables(**settings: Any) -> int:
        plan = plan_memory(config, ServingShape(**settings))
        return next(need.size_bytes for need in plan.needs if need.what == "rotary tables")

    positions, head = config["max_position_embeddings"], config["head_dim"]
    assert tables() == positions * head * (4 + 2 * 2)
    assert tables(context_tokens=1 << 17) == (1 << 17) * head * (4 + 2 * 2)
    assert tables(context_tokens=1 << 17, activation_bytes=4) == (1 << 17) * head * 4


def test_states_of_linear_attention_are_counted_for_each_slot_and_keys_for_the_layers_that_have_them() -> None:
    config = load_preset("Qwen3-Next-80B-A3B").config
    assert cached_numbers_per_token(config) == 12 * 2 * 2 * 256
    plan = plan_memory(config, ServingShape(state_slots=128))
    of_one = 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    assert row(plan, "states of linear attention") == 129 * of_one
    smaller = load_preset("Qwen3.5-35B-A3B").config
    assert cached_numbers_per_token(smaller) == 10 * 2 * 2 * 256
    plan = plan_memory(smaller, ServingShape(state_slots=64))
    assert row(plan, "states of linear attention") == 65 * 30 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    need = next(need for need in plan.needs if need.what == "states of linear attention")
    assert need.lower == ("--max-running-requests",)
    assert not any(need.what == "states of linear attention" for need in plan_memory(QWEN, ServingShape()).needs)
