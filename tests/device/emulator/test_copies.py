"""Copies between host and device: what pinned and pageable memory hold, and when."""

from __future__ import annotations

import pytest
import torch
from device import backend


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def test_pinned_memory_is_known(late_device: torch.device) -> None:
    buffer = torch.empty(5, dtype=torch.uint8, pin_memory=True)
    assert buffer.is_pinned() and buffer[2:].is_pinned() and buffer.pin_memory() is buffer
    assert not torch.empty(5).is_pinned() and torch.empty(5).pin_memory().is_pinned()


def test_a_queued_copy_poisons_its_pinned_destination(late_device: torch.device) -> None:
    destination = pinned(1, 2, 3)
    destination.copy_(torch.zeros(3, device=late_device), non_blocking=True)
    assert destination.isnan().all()
    torch.accelerator.synchronize()
    assert destination.tolist() == [0, 0, 0]


def test_a_pinned_source_that_changes_too_early_is_an_error_that_names_the_copy(late_device: torch.device) -> None:
    source = pinned(1, 2, 3)
    source.to(late_device, non_blocking=True)
    source[1] = 7
    message = r"copy of pinned Float \[3\] to the device failed.* the pinned source changed after the copy was queued"
    with pytest.raises(RuntimeError, match=message):
        torch.accelerator.synchronize()


def test_a_pinned_source_may_be_freed_while_its_copy_is_queued(scheduled_device: torch.device) -> None:
    copies = [pinned(i, i).to(scheduled_device, non_blocking=True) for i in range(50)]
    assert [copy.tolist() for copy in copies] == [[i, i] for i in range(50)]


def test_a_buffer_that_goes_out_and_in_on_one_stream_needs_no_wait(scheduled_device: torch.device) -> None:
    buffer = pinned(1, 2)
    there = buffer.to(scheduled_device, non_blocking=True)
    buffer.copy_(torch.full((2,), 5.0, device=scheduled_device), non_blocking=True)
    assert there.tolist() == [1, 2]
    assert buffer.tolist() == [5, 5]


def test_a_pageable_source_is_copied_when_the_copy_is_queued(late_device: torch.device) -> None:
    source = torch.ones(3)
    with backend.no_hidden_waits():
        there = source.to(late_device, non_blocking=True)
    source.zero_()
    assert there.tolist() == [1, 1, 1]


def test_a_pageable_destination_is_awaited_also_where_the_copy_need_not_block(late_device: torch.device) -> None:
    with backend.counted_waits() as waits:
        assert torch.empty(3).copy_(torch.ones(3, device=late_device), non_blocking=True).tolist() == [1, 1, 1]
    assert waits == {"copy to the host": 1}


def test_copies_convert_and_broadcast(scheduled_device: torch.device) -> None:
    there = torch.zeros(2, 3, dtype=torch.float64, device=scheduled_device)
    there.t()[1:].copy_(pinned(1, 2), non_blocking=True)
    assert there.tolist() == [[0, 1, 1], [0, 2, 2]]
    back = torch.empty(3, 2, dtype=torch.bfloat16, pin_memory=True)
    back.copy_(there.t(), non_blocking=True)
    torch.accelerator.synchronize()
    assert back.tolist() == [[0, 0], [1, 2], [1, 2]]


def test_hidden_waits_are_counted_by_their_reason(late_device: torch.device) -> None:
    values = torch.tensor([0.0, 1.0, 2.0], device=late_device)
    with backend.counted_waits() as waits:
        values.max().item()
        values.nonzero()
        values[values > 0]
        values.to("cpu")
        values[values > 0] = 5.0  # masked_fill: no wait
        torch.accelerator.synchronize()  # not hidden
    assert waits == {
        "aten::_local_scalar_dense": 1,
        "aten::nonzero": 1,
        "aten::index.Tensor": 1,
        "copy to the host": 1,
    }


def test_hidden_waits_can_be_forbidden(late_device: torch.device) -> None:
    value = torch.ones((), device=late_device)
    with (
        backend.no_hidden_waits(),
        pytest.raises(RuntimeError, match="aten::_local_scalar_dense waits for the device, and hidden waits are forb"),
    ):
        value.item()
    assert value.item() == 1
