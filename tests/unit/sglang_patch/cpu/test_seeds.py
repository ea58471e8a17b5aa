"""Seeded sampling: a request's seed and position choose its token, whatever else is in the batch."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference.cases import choose
from reference.drawn import drawn

from kt_runtime.sglang_patch.cpu.seeds import UNSEEDED, draw, seed_of, uniform

ALL = 1 << 30  # SGLang's top_k of a request without one


def info(seeds: list[int | None], **limits: list[float]) -> Any:
    count = len(seeds)
    return SimpleNamespace(
        sampling_seed=torch.tensor([seed_of(seed) for seed in seeds]),
        top_ks=torch.tensor(limits.get("top_ks", [ALL] * count)),
        top_ps=torch.tensor(limits.get("top_ps", [1.0] * count)),
        min_ps=torch.tensor(limits.get("min_ps", [0.0] * count)),
        need_min_p_sampling="min_ps" in limits,
        sampling_mask_batch_indices=None,
        max_top_k=None,
    )


def sample(probs: torch.Tensor, of: Any, positions: list[int], is_simple: bool = True) -> list[int]:
    from sglang.srt.layers.sampler import Sampler

    tokens, capture = Sampler._sample_from_probs(None, probs.clone(), of, torch.tensor(positions), is_simple)
    assert capture is None
    return tokens.tolist()


def probabilities(rows: int, vocabulary: int = 700) -> torch.Tensor:
    return torch.softmax(3 * drawn(rows, vocabulary, seed=4), dim=-1)


def test_a_seed_draws_the_same_token_alone_and_beside_others(served: SimpleNamespace) -> None:
    probs = probabilities(6)
    seeds: list[int | None] = [5, None, 6, 5, None, 7]
    together = sample(probs, info(seeds), [11] * 6)
    for row in (0, 2, 3, 5):
        assert sample(probs[row : row + 1], info(seeds[row : row + 1]), [11]) == together[row : row + 1]
    limited = sample(probs, info(seeds, top_ps=[0.9] * 6, top_ks=[40] * 6), [11] * 6, is_simple=False)
    for row in (0, 2, 3, 5):
        alone = info(seeds[row : row + 1], top_ps=[0.9], top_ks=[40])
        assert sample(probs[row : row + 1], alone, [11], is_simple=False) == limited[row : row + 1]


def test_positions_and_seeds_draw_anew(served: SimpleNamespace) -> None:
    probs = probabilities(1).expand(200, -1)
    by_position = sample(probs, info([3] * 200), list(range(200)))
    by_seed = sample(probs, info(list(range(200))), [9] * 200)
    assert min(len(set(by_position)), len(set(by_seed))) > 20


def test_the_seeds_of_a_batch_survive_the_call(served: SimpleNamespace) -> None:
    of = info([3, None])
    sample(probabilities(2), of, [0, 0])
    assert of.sampling_seed.tolist() == [3, UNSEEDED]


@pytest.mark.slow
@pytest.mark.parametrize("limits", [None, (3, 1.0, 0.0), (ALL, 0.75, 0.0), (ALL, 1.0, 0.5)])
def test_tokens_are_drawn_by_their_probability(limits: tuple[int, float, float] | None) -> None:
    probs = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2])
    draws = choose(few=5_000, usual=20_000, every=20_000)
    counts = Counter(draw(probs, uniform(8, position), limits) for position in range(draws))
    kept = {None: [0, 1, 3, 4], (3, 1.0, 0.0): [1, 3, 4], (ALL, 0.75, 0.0): [1, 3, 4], (ALL, 1.0, 0.5): [1, 3, 4]}
    total = float(sum(probs[token] for token in kept[limits]))
    assert sorted(counts) == kept[limits]
    for token, count in counts.items():
        assert abs(count / draws - float(probs[token]) / total) < 0.02  # measured: 0.005


def test_the_ends_of_the_interval_draw_tokens_that_have_a_probability() -> None:
    probs = torch.tensor([0.0, 0.7, 0.3, 0.0])
    assert draw(probs, 0.0) == 1
    assert draw(probs, 1.0) == draw(probs, 1 - 2**-53) == 2


def test_seeds_from_end_to_end_of_int64_are_different_numbers() -> None:
    seeds = [-(2**63) + 1, -1, 0, 1, 2**63 - 1]
    numbers = {uniform(seed, position) for seed in seeds for position in range(50)}
    assert len(numbers) == 250 and all(0 <= number < 1 for number in numbers)
    assert seed_of(-(2**63)) == -(2**63) + 1 and seed_of(None) == UNSEEDED
