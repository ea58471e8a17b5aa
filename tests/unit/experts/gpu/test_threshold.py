"""The number of tokens from which on streaming is no slower, from given times and from those of this machine."""

from __future__ import annotations

import pytest
import torch
from reference import moe
from reference.expert_problems import build_layer

from kt_runtime.experts.gpu.ring import ExpertRing
from kt_runtime.experts.gpu.threshold import crossover, measured


def test_lines_that_cross_between_two_numbers_cross_there() -> None:
    found = crossover(lambda tokens: 1.0 + tokens / 1000, lambda tokens: tokens / 100, 4096)
    assert found.tokens == 112  # 1 + t / 1000 = t / 100 at 111.1
    assert [one.tokens for one in found.timed] == [16, 32, 64, 128]


def test_equal_times_are_enough() -> None:
    assert crossover(lambda _: 0.64, lambda tokens: tokens / 100, 4096).tokens == 64


def test_what_is_faster_at_the_fewest_tokens_streams_from_there() -> None:
    assert crossover(lambda _: 0.01, lambda _: 0.02, 4096).tokens == 16


@pytest.mark.parametrize(("most", "tried"), [(100, [16, 32, 64, 100]), (128, [16, 32, 64, 128]), (8, [8])])
def test_the_last_number_that_is_tried_is_the_largest_call(most: int, tried: list[int]) -> None:
    found = crossover(lambda _: 2.0, lambda _: 1.0, most)
    assert found.tokens is None
    assert [one.tokens for one in found.timed] == tried


@pytest.mark.parametrize(("cpu", "most", "found"), [(2**-7, 4096, 256), (2**-7, 200, None), (0.0, 4096, None)])
def test_lines_are_continued_where_time_is_over(cpu: float, most: int, found: int | None) -> None:
    """2 = t / 128 at 256 tokens, of which 64 were tried."""
    calls: list[int] = []

    def cpu_seconds(tokens: int) -> float:
        calls.append(tokens)
        return cpu * tokens

    result = crossover(lambda _: 2.0, cpu_seconds, most, lambda: len(calls) == 3)
    assert calls == [16, 32, 64] and result.tokens == found


def test_one_number_may_be_all_there_is_time_for() -> None:
    assert crossover(lambda _: 2.0, lambda tokens: tokens / 128, 4096, lambda: True).tokens == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_this_machine_is_timed(dtype: torch.dtype) -> None:
    """Which way is faster on the host is not asked: only that both ran for the same tokens, and took time."""
    layer = build_layer(moe.random_experts(6, 64, 32))
    ring = ExpertRing(torch.device("cpu"), layer.shape, 2)
    try:
        found = measured(ring, layer, 3, dtype, 64)
    finally:
        ring.close()
    assert [one.tokens for one in found.timed] == [16, 32, 64][: len(found.timed)]
    assert all(one.streamed > 0 and one.cpu > 0 for one in found.timed)
    assert found.tokens is None or 1 <= found.tokens <= 64
