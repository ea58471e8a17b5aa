"""A pair in one row, its prompt once, against its two sequences on their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from reference.resident.configs import FAMILIES

from kt_runtime.resident.training.call import Call, CallResult
from kt_runtime.resident.training.losses import WeightedCrossEntropy
from kt_runtime.resident.training.slices import training_call
from kt_runtime.resident.twin.attention import visible_keys
from kt_runtime.resident.twin.batches import Branch, TrainingBatch, split


@pytest.fixture
def pairs() -> TrainingBatch:
    """Two pairs with prompts of 23 and 5 tokens; the second's answers begin at once."""
    random, parts = np.random.default_rng(3), []
    for prompt, answers in ((23, (9, 14)), (5, (1, 3))):
        shared = random.integers(0, 300, (2, prompt))
        for answer in answers:
            own = random.integers(0, 300, (2, answer))
            weights = np.concatenate([np.zeros(prompt), random.uniform(0.2, 1.0, answer)])
            parts.append((*np.concatenate([shared, own], axis=1), weights))
    tokens, targets, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
    lengths = [len(part[0]) for part in parts]
    return TrainingBatch(lengths, tokens.astype(np.int32), targets.astype(np.int32), weights.astype(np.float32))


def run(lab: Any, session: Any, batch: TrainingBatch, *, pairs: bool, retain: bool = False) -> CallResult:
    call = Call(lab.twin, lab.lora, session.key, WeightedCrossEntropy(), True, 1, retain=retain)
    slices = training_call(call, split(batch, 60, torch.device("cpu"), pairs=pairs), len(batch.tokens))
    while True:
        try:
            next(slices)
        except StopIteration as stop:
            return stop.value


@pytest.mark.parametrize("retain", [False, True], ids=["recompute", "retain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_changes_no_log_probability_and_no_gradient(
    make_lab: Any, pairs: TrainingBatch, family: str, attends_in_float32: bool, retain: bool
) -> None:
    lab = make_lab(family, attends_in_float32=attends_in_float32)
    session = lab.session()
    shared, apart = (run(lab, session, pairs, pairs=pairs_, retain=retain) for pairs_ in (True, False))
    assert apart.num_computed - shared.num_computed == 23 + 5
    if attends_in_float32:  # a query's sum over its keys has one order
        assert torch.equal(shared.logprobs, apart.logprobs)
        # The tokens are in other microbatches, so float64 sums have another order: equal here by luck, at most 3.1e-16
        # in 2,000 random losses.
        assert shared.loss == pytest.approx(apart.loss, rel=2e-15, abs=0)
    else:
        assert shared.loss == pytest.approx(apart.loss, rel=9e-8)  # 9.2e-9 measured, 2.3e-8 portably
        torch.testing.assert_close(shared.logprobs, apart.logprobs, atol=8e-6, rtol=0)  # 9.5e-7 measured
    assert shared.gradient.keys() == apart.gradient.keys()
    worst = 0.0
    for name, wanted in apart.gradient.items():
        error = float((shared.gradient[name] - wanted).norm() / wanted.norm())
        worst = max(worst, error)
        assert error <= (3e-6 if attends_in_float32 else 8e-6), name  # 3.1e-7 and 1.2e-6 measured
    print(f"{family}: largest relative error of a gradient {worst:.1e}")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bf16_a_shared_prompt_gives_the_same_log_probabilities(
    make_lab: Any, pairs: TrainingBatch, family: str
) -> None:
    """To the bit: row by row the same products, and sums over the same keys in the same order."""
    lab = make_lab(family, dtype=torch.bfloat16)
    session = lab.session()
    shared, apart = (run(lab, session, pairs, pairs=pairs_) for pairs_ in (True, False))
    assert torch.equal(shared.logprobs, apart.logprobs)


def test_the_first_sequence_of_a_row_never_sees_the_second(make_lab: Any, pairs: TrainingBatch) -> None:
    lab = make_lab("qwen3_moe")
    session, changed = lab.session(), pairs.tokens.copy()
    changed[sum(pairs.lengths[:2]) - 5 : sum(pairs.lengths[:2])] = 7  # the first pair's rejected answer
    other = TrainingBatch(pairs.lengths, changed, pairs.targets, pairs.weights)
    before, after = (run(lab, session, batch, pairs=True).logprobs for batch in (pairs, other))
    assert torch.equal(before[: pairs.lengths[0]], after[: pairs.lengths[0]])
    assert not torch.equal(before, after)


def test_the_mask_says_what_the_two_sequences_see() -> None:
    """Prefix 0 1, chosen 2 3, rejected 4 5."""
    mask = visible_keys((Branch(2, 4),), 6, torch.device("cpu"))[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]
