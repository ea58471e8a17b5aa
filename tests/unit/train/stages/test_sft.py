"""A step's loss is the mean over its trained tokens, however they lie in micro-batches."""

from __future__ import annotations

import pytest
from reference.resident.counting_resident import CountingResident

from kt_runtime.train.examples import Example
from kt_runtime.train.stages.sft import Sft
from kt_runtime.wire import LoraSettings


@pytest.fixture
def sft(resident: CountingResident) -> Sft:
    resident.create_session("s", LoraSettings(rank=2, alpha=4))
    return Sft(resident, "s", "recompute")


def test_weights_of_a_step_add_up_to_one(sft: Sft, resident: CountingResident, examples: list[Example]) -> None:
    outcome = sft.accumulate([examples[:2], examples[2:5]])
    batches = [entry[1] for entry in resident.log if entry[0] == "forward_backward"]
    assert sum(float(batch.weights.sum()) for batch in batches) == 1.0
    assert outcome.num_samples == 5 and outcome.num_tokens == sum(row.num_tokens for row in examples[:5])


def test_evaluation_sums_over_trained_tokens_and_stops_when_told(sft: Sft, examples: list[Example]) -> None:
    totals = sft.evaluate(examples, 2, lambda: False)
    assert totals is not None and totals.count == totals.trained_tokens == sum(row.num_trained for row in examples)
    one = sft.evaluate(examples, 6, lambda: False)
    assert one is not None and one.loss == totals.loss
    assert sft.evaluate(examples, 2, lambda: True) is None
