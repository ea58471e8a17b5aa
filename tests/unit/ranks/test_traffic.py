"""What ranks send and how long a token takes, on paper: against counts by hand and measured runs."""

from __future__ import annotations

import pytest
from reference.ranks.traffic import Machine, Traffic, busiest, dense_parameters, predicted, sent_bytes

from kt_runtime.serve.models.presets import load_preset

BENCH = load_preset("bench-qwen3-moe").config
DEEPSEEK = load_preset("DeepSeek-V3").config


def test_bytes_of_the_bench_preset_counted_by_hand() -> None:
    """Hidden 1,024, 16 heads of 64, 4 experts of a token, 12 layers, 768 tokens in the vocabulary, bf16, two ranks."""
    layer = 16 * 64 * 2 // 2 + 1024 * 2 // 2 + 4 * 4 * 1024 // 4 + 1024 * 2 // 2
    found = sent_bytes(BENCH, num_ranks=2, activation_bytes=2)
    assert found.needed == 12 * layer + 1024 * 2 // 2 + 768 * 2 // 2
    assert found.sums == 25 * 1024 * 2 // 2 and found.total == found.needed + found.sums
    assert found.exchanges == 12 * 4 + 2


def test_bytes_of_a_measured_run() -> None:
    """Two hosts in network namespaces, the bench preset in bf16: a rank's exchanges sent 4,265,156 bytes for 49 tokens
    (docs/scale.md). Logits are not in it; that all ranks saw finite numbers is, with 4 bytes a token. SGLang's modules
    (--no-step) sent 3,010,756 there, and what it sums besides.
    """
    paper = sent_bytes(BENCH, num_ranks=2, activation_bytes=2)
    assert paper.needed - 768 + 4 == 4_265_156 / 49
    exchanged = paper.needed - paper.sums - 768
    assert exchanged + 4 == 3_010_756 / 49


def test_bytes_of_deepseek_counted_by_hand() -> None:
    """Hidden 7,168, 128 heads of 128, 8 of 256 experts and one shared of 2,048, 3 dense layers of 18,432 of 61."""
    layers = 61 * (128 * 128 + 7168) * 2 + 3 * (18432 + 7168) * 2 + 58 * ((2048 + 7168) * 2 + 8 * 4 * 7168 / 4)
    found = sent_bytes(DEEPSEEK, num_ranks=4, activation_bytes=2)
    assert found.needed == 0.75 * (layers + (7168 + int(DEEPSEEK["vocab_size"])) * 2)
    assert found.exchanges == 61 * 4 + 58 + 2


def test_bytes_of_norms_of_all_heads_and_of_a_model_without_shared_experts_counted_by_hand() -> None:
    """Hidden 128, 3 layers. OLMoE: 4 heads of 32, as many keys, 4 experts of a token. Mixtral: 2 experts."""
    olmoe, mixtral = (load_preset(name).config for name in ("tiny-olmoe", "tiny-mixtral"))
    rest = 128 * 2 // 2 + 768 * 2 // 2
    layer = 128 * 2 // 2 + 128 * 2 // 2 + 128 * 2 // 2
    found = sent_bytes(olmoe, num_ranks=2, activation_bytes=2)
    assert found.needed == 3 * (layer + 2 * 128 * 2 // 2 + 4 * 4 * 128 // 4) + rest
    assert found.exchanges == 3 * 6 + 2
    found = sent_bytes(mixtral, num_ranks=2, activation_bytes=2)
    assert found.needed == 3 * (layer + 2 * 4 * 128 // 4) + rest
    assert found.exchanges == 3 * 4 + 2


def test_one_rank_sends_nothing() -> None:
    assert sent_bytes(BENCH, num_ranks=1, activation_bytes=2).total == 0


@pytest.mark.parametrize(
    ("experts", "chosen", "ranks", "expected"),
    [(4, 1, 2, 1.0), (4, 2, 2, 4 / 3), (8, 8, 4, 2.0), (256, 8, 1, 8.0)],
)
def test_the_busiest_rank_of_few_experts_counted_by_hand(
    experts: int, chosen: int, ranks: int, expected: float
) -> None:
    assert busiest(experts, chosen, ranks) == expected


def test_a_token_takes_the_sum_of_its_parts() -> None:
    machine = Machine(1e9, 1e6, 0.001, 0.01)
    found = predicted(BENCH, machine, num_hosts=2, weight_bytes=2, traffic=Traffic(1000, 500, 7))
    expert = 3 * 1024 * 512
    weights = dense_parameters(BENCH) / 2 + 12 * busiest(64, 4, 2) * expert
    assert found.reading_s == 2 * weights / 1e9
    assert found.bytes_s == 0.0015 and found.exchanges_s == 0.007
    assert found.overhead_s == 0.12
    assert found.token_s == found.reading_s + 0.0015 + 0.007 + 0.12
    alone = predicted(BENCH, machine, num_hosts=1, weight_bytes=2)
    assert alone.bytes_s == alone.exchanges_s == 0 and alone.reading_s > found.reading_s
