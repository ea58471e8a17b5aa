"""How a batch becomes rows and padded slots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kt_runtime.errors import InvalidValueError
from kt_runtime.sglang_patch.cpu.attention import create_backend, decode_batch, extend_rows

TABLE = torch.arange(100, 160).view(3, 20)  # request, position -> slot


def test_an_extend_reads_prefix_and_new_slots_of_each_request() -> None:
    rows = extend_rows(TABLE, torch.tensor([2, 0]), [4, 0], [3, 5])
    assert [(row.start, row.stop, row.prefix_tokens) for row in rows] == [(0, 3, 4), (3, 8, 0)]
    assert rows[0].slots.tolist() == list(range(140, 147))
    assert rows[1].slots.tolist() == list(range(100, 105))


def test_a_decode_batch_is_padded_with_the_reserved_slot() -> None:
    batch = decode_batch(TABLE, torch.tensor([1, 0]), torch.tensor([3, 5]))
    assert batch.slots is not None
    assert batch.slots.tolist() == [[120, 121, 122, 0, 0], [100, 101, 102, 103, 104]]


def test_a_very_uneven_decode_batch_is_not_padded() -> None:
    batch = decode_batch(TABLE, torch.tensor([1, 0, 2]), torch.tensor([1, 20, 1]))
    assert batch.slots is None
    assert [(row.start, row.stop, row.prefix_tokens, len(row.slots)) for row in batch.rows] == [
        (0, 1, 0, 1),
        (1, 2, 19, 20),
        (2, 3, 0, 1),
    ]


def test_a_sliding_window_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="sliding window of 512"):
        create_backend(SimpleNamespace(sliding_window_size=512))
