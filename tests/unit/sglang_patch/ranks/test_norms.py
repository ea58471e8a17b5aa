"""Norms of all heads at once in SGLang's modules, between real ranks."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from reference.ranks.real_ranks import run_ranks

from kt_runtime.ops.norms import rms_norm
from kt_runtime.ranks import Exchange
from kt_runtime.sglang_patch.cpu import norms as cpu_norms
from kt_runtime.sglang_patch.ranks import group, norms

TOKENS, WIDTH, EPSILON = 5, 48, 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_s_heads_have_the_bits_of_one_process(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((TOKENS, WIDTH), (WIDTH,)))
    of_one_norm = SimpleNamespace(weight=weight, variance_epsilon=EPSILON)

    def work(exchange: Exchange) -> list[torch.Tensor]:
        own = exchange.share.columns_of(x)
        both = SimpleNamespace(_q_norm=of_one_norm, _k_norm=of_one_norm)
        with mock.patch.object(group, "exchange", lambda: exchange):
            alone = norms.heads_norm(own, weight, EPSILON)  # OLMoE's
            return [alone, *cpu_norms._normalise_queries_and_keys(both, own, own)]  # MiniMax-M2's

    expected = rms_norm(x, weight, EPSILON)
    for found in zip(*run_ranks(3, work, "memory"), strict=True):
        assert torch.equal(torch.cat(found, dim=1), expected)


def test_a_norm_of_a_token_or_of_a_head_exchanges_nothing() -> None:
    def nobody() -> Exchange:
        raise AssertionError("it has exchanged")

    with mock.patch.object(group, "exchange", nobody):
        for shape in ((TOKENS, WIDTH), (TOKENS, 2, WIDTH)):
            assert norms.heads_norm(torch.ones(shape), torch.ones(WIDTH), EPSILON).shape == shape


def test_each_rank_holds_the_whole_weight() -> None:
    norm = SimpleNamespace(weight=torch.ones(WIDTH // 2))
    norms.hold_whole_weight(None, norm, WIDTH, num_heads=4)
    assert len(norm.weight) == WIDTH // 2  # with one rank SGLang's
    with mock.patch.object(group, "num_ranks", lambda: 2):
        norms.hold_whole_weight(None, norm, WIDTH, num_heads=4)
    assert len(norm.weight) == WIDTH and not hasattr(norm.weight, "weight_loader")
