"""Captured graphs of the device: work is recorded once, and replayed with the same addresses (torch.accelerator.Graph).

Replays are queued, so they run as late as any work.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device import backend
from torch import Tensor


def captured(run: Callable[[], Tensor]) -> tuple[torch.accelerator.Graph, Tensor]:
    """The graph of `run` on a stream of its own, and the tensor that replays write."""
    graph, stream = torch.accelerator.Graph(), torch.Stream(device="late")
    stream.wait_stream(torch.accelerator.current_stream())
    with stream, graph:
        result = run()
    torch.accelerator.current_stream().wait_stream(stream)
    return graph, result


def test_a_replay_computes_with_what_the_inputs_hold_then(scheduled_device: torch.device) -> None:
    x = torch.ones(3, device=scheduled_device)
    graph, result = captured(lambda: (x * 2 + 1).cumsum(0))
    got = []
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        got.append(result.clone())
    assert [t.tolist() for t in got] == [[3, 6, 9], [11, 22, 33]]


def test_a_capture_runs_nothing(late_device: torch.device) -> None:
    x = torch.ones(3, device=late_device)
    graph, result = captured(lambda: x * 2)
    assert result.isnan().all()
    graph.replay()
    assert result.tolist() == [2, 2, 2]


def test_pinned_buffers_are_read_and_written_by_each_replay(scheduled_device: torch.device) -> None:
    source, destination = torch.zeros(2).pin_memory(), torch.zeros(2).pin_memory()
    there = torch.empty(2, device=scheduled_device)

    def run() -> Tensor:
        there.copy_(source, non_blocking=True)
        doubled = there * 2
        destination.copy_(doubled, non_blocking=True)
        return doubled

    graph, _ = captured(run)
    for value in (1.0, 4.0):
        source.fill_(value)
        graph.replay()
        torch.accelerator.synchronize()
        assert destination.tolist() == [2 * value, 2 * value]
    backend.set_schedule("late")
    graph.replay()
    source.fill_(7.0)
    with pytest.raises(RuntimeError, match="the pinned source changed after the copy was queued"):
        torch.accelerator.synchronize()


def test_a_side_stream_that_waits_for_the_capture_is_captured(scheduled_device: torch.device) -> None:
    x, side = torch.ones(3, device=scheduled_device), torch.Stream(device=scheduled_device)

    def run() -> Tensor:
        main = torch.accelerator.current_stream()
        side.wait_event(main.record_event())
        with side:
            shared = x + 1
        other = x * 3
        main.wait_event(side.record_event())
        return shared + other

    graph, result = captured(run)
    x.fill_(2.0)
    graph.replay()
    assert result.tolist() == [9, 9, 9]


def test_work_of_the_host_between_two_graphs_is_an_eager_break(scheduled_device: torch.device) -> None:
    """Experts on the CPU between captured segments: copied out, awaited, computed, copied in."""
    x, routed = torch.ones(3, device=scheduled_device), torch.empty(3, device=scheduled_device)
    buffer = torch.empty(3, pin_memory=True)
    before, hidden = captured(lambda: x + 1)
    after, result = captured(lambda: hidden + routed)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        before.replay()
        buffer.copy_(hidden, non_blocking=True)
        torch.accelerator.current_stream().record_event().synchronize()
        routed.copy_(buffer * 10, non_blocking=True)
        after.replay()
        assert result.tolist() == [11 * (value + 1)] * 3


def test_memory_of_a_graph_is_given_to_nobody_while_the_graph_is_there(scheduled_device: torch.device) -> None:
    x = torch.ones(1000, device=scheduled_device)
    graph, result = captured(lambda: (x * 2) * 3)
    others = [torch.full((1000,), 7.0, device=scheduled_device) for _ in range(10)]
    graph.replay()
    assert result.sum().item() == 6000 and all(other.sum().item() == 7000 for other in others)
    del graph
    torch.accelerator.synchronize()


@pytest.mark.parametrize("what", ["_local_scalar_dense", "nonzero", "copy to the host", "a synchronization"])
def test_what_waits_for_the_device_is_refused_while_a_graph_is_captured(late_device: torch.device, what: str) -> None:
    x = torch.ones(3, device=late_device)
    waits: dict[str, Callable[[], object]] = {
        "_local_scalar_dense": lambda: x.sum().item(),
        "nonzero": x.nonzero,
        "copy to the host": lambda: x.to("cpu"),
        "a synchronization": lambda: torch.accelerator.current_stream().synchronize(),
    }

    def run() -> Tensor:
        assert torch.accelerator.current_stream().is_capturing()
        waits[what]()
        return x

    with pytest.raises(RuntimeError, match=f"{what}.* is not permitted while a graph is captured"):
        captured(run)
    assert not torch.accelerator.current_stream().is_capturing() and x.sum().item() == 3
