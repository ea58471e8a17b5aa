"""`serve --tp-size`: what is refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from reference.families import PRESETS

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import FAMILIES, family_for
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.serve.ranks import check_ranks

QWEN = load_preset("tiny-qwen3-moe").config
TWO = ServeOptions(model="tiny-qwen3-moe", device="cpu", tp_size=2)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kt_runtime.serve.ranks.has_gpu", lambda: False)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"cache_host_bytes": 1 << 24, "cache_disk_bytes": 1 << 24},
        {"registry": "/srv/registry"},
        {"routing_replay_bytes": 1 << 20},
        {"finetuning_dir": "/srv/jobs"},
        {"lora_memory_bytes": 1 << 20},
        {"max_adapter_disk_bytes": 1 << 20},
    ],
)
def test_ranks_are_taken_with_the_options_of_one(given: dict[str, Any]) -> None:
    check_ranks(replace(TWO, **given), QWEN)


@pytest.mark.parametrize(
    ("ranks", "changed", "problem"),
    [
        (3, {}, "--tp-size 3: 4 attention heads can't be split evenly over 3 ranks"),
        (4, {}, "--tp-size 4: 2 key-value heads can't be split evenly over 4 ranks"),
        (2, {"num_experts": 7}, "--tp-size 2: 7 routed experts can't be split evenly over 2 ranks"),
        (2, {"hidden_size": 127}, "--tp-size 2: 127 hidden units can't be split evenly over 2 ranks"),
    ],
)
def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused_with_both_values(
    ranks: int, changed: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidValueError, match=problem):
        check_ranks(replace(TWO, tp_size=ranks), {**QWEN, **changed})


@pytest.mark.parametrize("family", [family.name for family in FAMILIES if family.splits_over_ranks])
def test_two_ranks_can_share_the_tiny_model_of_each_family_that_is_split(family: str) -> None:
    check_ranks(TWO, PRESETS[family].config)


@pytest.mark.parametrize(
    ("family", "changed", "problem"),
    [
        ("glm4_moe", {"intermediate_size": 255}, "255 units of dense layers can't be split evenly over 2 ranks"),
        ("glm4_moe", {"moe_intermediate_size": 63}, "63 units of shared experts can't be split evenly over 2 ranks"),
        ("llama4_text", {"intermediate_size_mlp": 255}, "255 units of dense layers can't be split evenly over 2 ranks"),
        ("gpt_oss", {"num_key_value_heads": 3}, "3 key-value heads can't be split evenly over 2 ranks"),
        ("deepseek_v3", {"num_attention_heads": 3}, "3 attention heads can't be split evenly over 2 ranks"),
        ("qwen3_next", {"linear_num_key_heads": 1}, "1 heads of linear attention can't be split evenly over 2 ranks"),
    ],
)
def test_dense_layers_and_shared_experts_must_divide_too(family: str, changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidValueError, match=f"--tp-size 2: {problem}"):
        check_ranks(TWO, {**PRESETS[family].config, **changed})


def test_a_family_that_is_not_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(family_for(QWEN)), "splits_over_ranks", False)
    with pytest.raises(InvalidValueError, match="--tp-size 2: the family qwen3_moe is not split over ranks yet"):
        check_ranks(TWO, QWEN)


def gguf_config(**dense: str) -> dict[str, Any]:
    names = {f"model.layers.0.self_attn.{name}.weight": kind for name, kind in dense.items()}
    return {**QWEN, "quantization_config": {"quant_method": "gguf", "files": ["a.gguf"], "dense": names}}


def test_a_block_of_a_gguf_models_matrix_is_not_cut() -> None:
    """Of 128 inputs two ranks have 64 each: two blocks of Q8_0, a quarter of one of Q4_K."""
    assert QWEN["hidden_size"] == 128
    check_ranks(TWO, gguf_config(q_proj="Q8_0"))
    problem = r"--tp-size 2: .*q_proj\.weight has 128 inputs in blocks of 256 \(Q4_K\), which can't be split .* 2 ranks"
    with pytest.raises(InvalidValueError, match=problem):
        check_ranks(TWO, gguf_config(v_proj="Q8_0", q_proj="Q4_K"))


def test_a_registry_needs_whole_blocks_of_rows_of_a_gguf_model() -> None:
    """Of 64 rows two ranks have 32 each, and of 48 they have one block and a half."""
    shared = replace(TWO, registry="/srv/registry")
    check_ranks(shared, gguf_config(k_proj="Q8_0"))
    odd = {**gguf_config(k_proj="Q8_0"), "head_dim": 24}
    check_ranks(TWO, odd)
    problem = r"--tp-size 2: --registry: .*k_proj\.weight has 48 rows in blocks of 16, .* allowed: a multiple of 32"
    with pytest.raises(InvalidValueError, match=problem):
        check_ranks(shared, odd)


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kt_runtime.serve.ranks.has_gpu", lambda: True)
    with pytest.raises(InvalidValueError, match="--tp-size 2: ranks are processes on CPUs so far"):
        check_ranks(TWO, QWEN)


@pytest.mark.parametrize("ranks", [0, -1])
def test_less_than_one_rank_is_refused(ranks: int) -> None:
    with pytest.raises(InvalidValueError, match=f"--tp-size {ranks}: must be at least 1"):
        replace(TWO, tp_size=ranks)
