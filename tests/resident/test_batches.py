from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kt_runtime.errors import InvalidValueError
from kt_runtime.resident.batches import split

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_tokens", [1, 20, 64, 1000])
def test_every_token_is_in_exactly_one_microbatch(make_batch: Any, max_tokens: int) -> None:
    batch = make_batch(17, 30, 9, 1, 30)
    microbatches = split(batch, max_tokens, CPU)
    where = np.concatenate([microbatch.where.numpy() for microbatch in microbatches])
    assert sorted(where) == list(range(87))
    for microbatch in microbatches:
        rows, longest = microbatch.tokens.shape
        assert rows == 1 or rows * longest <= max_tokens
        flat, where = microbatch.tokens.flatten(), microbatch.where.numpy()
        assert np.array_equal(flat[microbatch.real].numpy(), batch.tokens[where])
        assert np.array_equal(microbatch.targets.numpy(), batch.targets[where])
        assert np.array_equal(microbatch.weights.numpy(), batch.weights[where])


def test_padding_marks_what_is_not_real(make_batch: Any) -> None:
    (microbatch,) = split(make_batch(3, 5), 100, CPU)
    assert microbatch.padding is not None
    assert microbatch.padding.view(2, 5).tolist() == [[False] * 5, [False] * 3 + [True] * 2]


def test_sequences_of_one_length_have_no_padding(make_batch: Any) -> None:
    (microbatch,) = split(make_batch(4, 4, 4), 100, CPU)
    assert microbatch.padding is None


def test_a_sequence_above_the_context_is_refused_with_both_numbers(make_batch: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"sequence 1 has 30 tokens.*20"):
        make_batch(10, 30).check(300, 20)


@pytest.mark.parametrize("bad", [-1, 300])
@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_a_token_outside_the_vocabulary_is_refused_with_its_place(make_batch: Any, name: str, bad: int) -> None:
    batch = make_batch(10)
    getattr(batch, name)[4] = bad
    with pytest.raises(InvalidValueError, match=rf"{name}\[4\] is {bad}.*0 to 299"):
        batch.check(300, 100)
