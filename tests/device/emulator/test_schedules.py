"""Work runs when the rules demand it, and in no order that they forbid."""

from __future__ import annotations

import pytest
import torch
from device import backend


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A queued copy, whose values tell whether it ran: NaN until then."""
    return torch.empty(tensor.shape, pin_memory=True).copy_(tensor, non_blocking=True)


def has_run(copy: torch.Tensor) -> bool:
    return not bool(copy.isnan().any())


def test_late_work_runs_when_its_stream_is_awaited(late_device: torch.device) -> None:
    copy = pinned_copy(torch.ones(3, device=late_device) + 1)
    assert not has_run(copy)
    torch.accelerator.current_stream().synchronize()
    assert copy.tolist() == [2, 2, 2]


def test_late_work_runs_up_to_the_mark_alone(late_device: torch.device) -> None:
    ones = torch.ones(3, device=late_device)
    first, event = pinned_copy(ones), torch.accelerator.current_stream().record_event()
    second = pinned_copy(ones)
    event.synchronize()
    assert has_run(first) and not has_run(second)


def test_a_synchronization_leaves_other_streams_alone(late_device: torch.device) -> None:
    ones = torch.ones(3, device=late_device)
    torch.accelerator.synchronize()
    other = torch.Stream(device=late_device)
    with other:
        copy = pinned_copy(ones)
    torch.accelerator.current_stream().synchronize()
    assert not has_run(copy)
    other.synchronize()
    assert has_run(copy)


def test_a_wait_runs_what_it_waits_for(scheduled_device: torch.device) -> None:
    """A chain over five streams, where each waits for the last one."""
    values = [torch.ones(3, device=scheduled_device)]
    last = torch.accelerator.current_stream()
    for _ in range(5):
        stream = torch.Stream(device=scheduled_device)
        stream.wait_event(last.record_event())
        with stream:
            values.append(values[-1] * 2)
        last = stream
    with last:
        copy = pinned_copy(values[-1])
    last.synchronize()
    assert copy.tolist() == [32, 32, 32]


def test_a_missing_wait_reads_poison_under_late(late_device: torch.device) -> None:
    value = torch.ones(3, device=late_device)
    stream = torch.Stream(device=late_device)
    with stream:
        copy = pinned_copy(value)
    stream.synchronize()
    assert copy.isnan().all()


def test_random_orders_differ_and_a_seed_repeats_its_order(late_device: torch.device) -> None:
    def found(seed: int) -> tuple[bool, ...]:
        backend.set_schedule("random", seed)
        values = [torch.ones(2, device=late_device) for _ in range(8)]
        torch.accelerator.synchronize()
        copies = []
        for value in values:
            with torch.Stream(device=late_device):
                copies.append(pinned_copy(value))
        run = tuple(has_run(copy) for copy in copies)
        torch.accelerator.synchronize()
        return run

    found(0)  # later calls find the same memory to reuse
    orders = [found(seed) for seed in range(10)]
    assert orders == [found(seed) for seed in range(10)] and len(set(orders)) > 3


def test_eager_work_runs_at_once(late_device: torch.device) -> None:
    backend.set_schedule("eager")
    assert has_run(pinned_copy(torch.ones(3, device=late_device)))


@pytest.mark.parametrize("what", ["event", "stream"])
def test_a_query_answers_no_a_few_times_and_then_yes(late_device: torch.device, what: str) -> None:
    copy, stream = pinned_copy(torch.ones(3, device=late_device)), torch.accelerator.current_stream()
    asked = stream.record_event() if what == "event" else stream
    assert [asked.query() for _ in range(3)] == [False, False, True] and has_run(copy)


def test_an_error_of_queued_work_is_raised_by_the_synchronization_and_names_it(late_device: torch.device) -> None:
    torch.ones(3, device=late_device)[torch.tensor([7], device=late_device)]
    with pytest.raises(RuntimeError, match=r"late: aten::index\.Tensor failed on the device: index 7 is out of bounds"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
