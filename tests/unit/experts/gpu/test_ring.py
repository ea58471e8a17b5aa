"""The ring's hand-over between caller and loader thread, on the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.experts import ExpertShape
from kt_runtime.experts.gpu.ring import ExpertRing, runs_of
from kt_runtime.experts.gpu.sizes import expert_bytes, ring_bytes, ring_chunk_experts

SHAPE = ExpertShape(num_experts=9, hidden=8, intermediate=4)
HOST = torch.device("cpu")


class NumberedLayer:
    """Expert e's weights are all e. `fails_at`: the expert that can't be unpacked."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.fails_at: int | None = None
        self.threads: set[str] = set()

    def unpack_range(self, first: int, count: int, w13: Tensor, w2: Tensor) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append((first, count))
        assert w13.shape == (count, 8, 8) and w2.shape == (count, 8, 4) and w13.is_contiguous()
        if self.fails_at is not None and first <= self.fails_at < first + count:
            raise ConflictError("the expert store of this layer is closed")
        for at in range(count):
            w13[at], w2[at] = first + at, first + at


@pytest.fixture
def ring() -> Iterator[ExpertRing]:
    made = ExpertRing(HOST, SHAPE, 2)
    yield made
    made.close()
    assert not any(thread.name == "kt-expert-loader" for thread in threading.enumerate())


def passed(ring: ExpertRing, layer: NumberedLayer, experts: list[int]) -> list[int]:
    """The experts that a pass yields, each checked by its weights."""
    seen: list[int] = []
    with closing(ring.chunks(layer, experts)) as chunks:
        for chunk in chunks:
            for at, expert in enumerate(chunk.experts):
                assert (chunk.w13[at] == expert).all() and (chunk.w2[at] == expert).all()
            assert len(chunk.w13) == len(chunk.w2) == len(chunk.experts) <= ring.chunk_experts
            seen += chunk.experts
    return seen


@pytest.mark.parametrize("experts", [[], [3], [0, 1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 5, 8], [0, 2, 4, 6, 8]])
def test_every_expert_is_loaded_once_in_order(ring: ExpertRing, experts: list[int]) -> None:
    layer = NumberedLayer()
    assert passed(ring, layer, experts) == experts
    assert [first + at for first, count in layer.calls for at in range(count)] == experts
    assert layer.threads <= {"kt-expert-loader"}


def test_consecutive_experts_are_unpacked_by_one_call(ring: ExpertRing) -> None:
    layer = NumberedLayer()
    passed(ring, layer, [0, 1, 4, 6, 7])
    assert layer.calls == [(0, 2), (4, 1), (6, 1), (7, 1)]
    assert list(runs_of([2, 3, 4, 7, 9, 10])) == [(0, 2, 3), (3, 7, 1), (4, 9, 2)]


def test_a_chunk_stays_until_the_next_one_is_asked_for(ring: ExpertRing) -> None:
    """The loader may be two chunks ahead of the caller's work, not three."""
    layer = NumberedLayer()
    with closing(ring.chunks(layer, list(range(9)))) as chunks:
        first = next(chunks)
        deadline = time.monotonic() + 60
        while sum(count for _, count in layer.calls) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.2)  # in which a loader without a bound would overwrite the slot
        assert (first.w13[0] == 0).all() and (first.w13[1] == 1).all()
        assert sum(count for _, count in layer.calls) == 4


def test_a_failure_of_the_loader_is_raised_in_the_caller_and_the_ring_stays_usable(ring: ExpertRing) -> None:
    layer = NumberedLayer()
    for fails_at in (0, 5, 8):
        layer.fails_at = fails_at
        with pytest.raises(ConflictError, match="the expert store of this layer is closed"):
            passed(ring, layer, list(range(9)))
        layer.fails_at = None
        assert passed(ring, layer, list(range(9))) == list(range(9))


def test_a_caller_that_leaves_early_does_not_disturb_the_next_one(ring: ExpertRing) -> None:
    layer = NumberedLayer()
    for taken in range(4):
        with pytest.raises(ZeroDivisionError), closing(ring.chunks(layer, list(range(9)))) as chunks:
            for _ in range(taken):
                next(chunks)
            raise ZeroDivisionError
        assert passed(ring, layer, [2, 3, 5]) == [2, 3, 5]


def test_threads_take_turns(ring: ExpertRing) -> None:
    seen: dict[int, list[int]] = {}

    def walk(number: int) -> None:
        seen[number] = [expert for _ in range(20) for expert in passed(ring, NumberedLayer(), [number, 4, 8])]

    threads = [threading.Thread(target=walk, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {number: [number, 4, 8] * 20 for number in range(3)}


def test_a_closed_ring_refuses(ring: ExpertRing) -> None:
    passed(ring, NumberedLayer(), [1])
    ring.close()
    ring.close()
    with pytest.raises(ConflictError, match="the ring of experts is closed"):
        passed(ring, NumberedLayer(), [1])


@pytest.mark.parametrize("chunk", [0, 10])
def test_a_chunk_is_one_expert_to_all(chunk: int) -> None:
    with pytest.raises(InvalidValueError, match=f"chunks of {chunk} experts; allowed: 1 to 9"):
        ExpertRing(HOST, SHAPE, chunk)


def test_sizes() -> None:
    shape = ExpertShape(num_experts=128, hidden=2048, intermediate=768)  # Qwen3-30B-A3B
    assert expert_bytes(shape) == 9_437_184
    assert ring_chunk_experts(shape) == 4
    assert ring_bytes(shape, 4) == 2 * 4 * 9_437_184
    assert ring_chunk_experts(shape, 3 * ring_bytes(shape, 1) - 1) == 2
    assert ring_chunk_experts(shape, ring_bytes(shape, 1) - 1) == 0
    assert ring_chunk_experts(SHAPE) == 9 and ring_chunk_experts(ExpertShape(64, 8, 4)) == 16
