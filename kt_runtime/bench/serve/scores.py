"""Log-probabilities of a few random prompts: the server's, and how far a peer's are from them.

For a quantized file also the format's error: how far its log-probabilities are from those of the unquantized weights,
both computed by one peer. The difference between two engines has to be small compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from kt_runtime.cli.connection import ServerAPI

PROMPTS = 4


@dataclass(frozen=True)
class Scores:
    """`logprobs`: of each prompt's tokens but the first, given those before; natural logarithms."""

    prompts: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """The mean and the largest |difference| of two engines' log-probabilities, over `tokens` tokens."""

    tokens: int
    mean: float
    largest: float


def served_scores(api: ServerAPI, prompts: list[list[int]]) -> Scores:
    """Asks the server for each prompt's log-probabilities."""
    return Scores(prompts, [_served(api, prompt) for prompt in prompts])


def _served(api: ServerAPI, prompt: list[int]) -> list[float]:
    sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    found = api.post("/generate", body)["meta_info"]["input_token_logprobs"]
    return [float(logprob) for logprob, *_ in found[1:]]


def difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Difference | None:
    """None if one of them has no log-probabilities. ValueError: of prompts of other lengths."""
    if not ours or not theirs:
        return None
    found = [
        abs(one - other)
        for our_prompt, their_prompt in zip(ours, theirs, strict=True)
        for one, other in zip(our_prompt, their_prompt, strict=True)
    ]
    return Difference(len(found), fmean(found), max(found))
