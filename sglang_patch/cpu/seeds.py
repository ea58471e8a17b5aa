"""`sampling_seed` of a request decides its tokens on a CPU: the same weights, prompt and seed sample the same answer.

Symbols (SGLang 0.5.23):

- `sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch`: reads requests' seeds only in SGLang's
  deterministic mode (`--enable-deterministic-inference`), whose kernels need a GPU. The seeds are carried by its
  attribute `sampling_seed`, which SGLang filters and merges with the batch; UNSEEDED marks a request without one.
- `layers.sampler.Sampler._sample_from_probs`: draws a batch's tokens. Requests without a seed are drawn by SGLang as
  before; a request with a seed gets the token that its seed and position choose.

Reason: without it SGLang accepts `sampling_seed` and ignores it. Reinforcement learning needs it to resume exactly, and
clients send it (`seed` of OpenAI's routes). SGLang's own seeded sampler hashes every token of the vocabulary for every
row and position; here a row needs one number and a cumulative sum. As a row's probabilities have the same bits in every
batch on a CPU, so does its token.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
    "sglang.srt.layers.sampler.Sampler._sample_from_probs",
)

UNSEEDED = -(2**63)
MASK = 2**64 - 1


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.after(SYMBOLS[0], _with_seeds)
        hooks.around(SYMBOLS[1], _sample)


def _with_seeds(info: Any, cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    info.sampling_seed = torch.tensor(
        [seed_of(request.sampling_params.sampling_seed) for request in batch.reqs], dtype=torch.int64
    )
    return info


def seed_of(asked: int | None) -> int:
    """UNSEEDED for None. The smallest int64 stands for its successor, since it is UNSEEDED."""
    return UNSEEDED if asked is None else max(asked, UNSEEDED + 1)


def _sample(
    original: Any, sampler: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, is_simple: bool
) -> Any:
    """(tokens, SGLang's capture of sampling masks, which is None where kt-runtime serves)."""
    seeds, info.sampling_seed = info.sampling_seed, None
    try:
        rows = [] if seeds is None else torch.nonzero(seeds != UNSEEDED).flatten().tolist()
        if len(rows) < len(probs):
            tokens, capture = original(sampler, probs, info, positions, is_simple)
        else:
            tokens, capture = torch.empty(len(probs), dtype=torch.int32), None
    finally:
        info.sampling_seed = seeds
    for row in rows:
        limits = None if is_simple else (int(info.top_ks[row]), float(info.top_ps[row]), float(info.min_ps[row]))
        tokens[row] = draw(probs[row], uniform(int(seeds[row]), int(positions[row])), limits)
    return tokens, capture


def draw(probs: torch.Tensor, number: float, limits: tuple[int, float, float] | None = None) -> int:
    """The token at `number` (0 to 1) of the cumulative probabilities. `probs` [vocabulary]: not negative.

    `limits`: top-k, top-p and min-p, as SGLang applies them: to tokens in falling order of probability, equal ones in
    the order of their ids. A token is kept by top-p if those before it do not exceed top-p.
    """
    weights, ids = probs.double(), None
    if limits is not None:
        top_k, top_p, min_p = limits
        weights, ids = weights.sort(descending=True, stable=True)
        before = weights.cumsum(0) - weights
        keep = (before <= top_p) & (weights >= weights[0] * min_p)
        keep[top_k:] = False
        weights = weights * keep
    cumulative = weights.cumsum(0)
    total = cumulative[-1]
    place = int(torch.searchsorted(cumulative, number * total, right=True))
    if place == len(weights):  # rounding: the last token of any weight
        place = int(torch.searchsorted(cumulative, total))
    return place if ids is None else int(ids[place])


def uniform(seed: int, position: int) -> float:
    """A number from 0 to below 1, of 53 bits, from two rounds of SplitMix64 (Steele et al., OOPSLA 2014)."""
    return (_mixed(_mixed(seed & MASK) ^ (position & MASK)) >> 11) / 2**53


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
