"""Memory of an adapter's copies: freed with the last tensor, kept for the next copy only while that is asked for."""

from __future__ import annotations

import hashlib
import os
import threading

import pytest
import torch

from kt_runtime import beside
from kt_runtime.adapters import tensors
from kt_runtime.adapters.tensors import (
    LARGE_BYTES,
    allocated,
    copy_in_pieces,
    give_way,
    largest,
    measured,
    on_threads,
    thread_pool,
)
from kt_runtime.priority import NICENESS

SHAPES = {"a": torch.Size((3, 5)), "none": torch.Size((0, 4)), "b": torch.Size((2, 7, 2))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_have_their_shapes_and_do_not_overlap(dtype: torch.dtype) -> None:
    found = allocated(SHAPES, dtype)
    for value, tensor in enumerate(found.values()):
        tensor.fill_(value)
    for value, (name, tensor) in enumerate(found.items()):
        assert tensor.shape == SHAPES[name] and tensor.dtype == dtype and bool((tensor == value).all())
        assert tensor.data_ptr() % 64 == 0
    assert allocated({}, dtype) == {}


def test_work_on_many_bytes_gives_way_and_so_do_the_threads_that_it_starts() -> None:
    found: dict[str, list[int]] = {}

    def niceness(_: object = None) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def work(name: str, num_bytes: int) -> None:
        give_way(num_bytes)
        found[name] = [niceness(), *on_threads(niceness, [None])]

    before = niceness()
    for name, num_bytes in (("small", LARGE_BYTES - 1), ("large", LARGE_BYTES)):
        thread = threading.Thread(target=work, args=(name, num_bytes))
        thread.start()
        thread.join(60)
    assert found["small"] == [before, before]
    assert found["large"] == [min(19, before + NICENESS)] * 2
    for num_bytes, expected in ((0, before), (LARGE_BYTES, min(19, before + NICENESS))):
        with thread_pool("kt-test", num_bytes) as threads:
            assert threads.submit(niceness).result(60) == expected
    assert niceness() == before


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2.5])
def test_what_is_measured_in_pieces_is_what_the_whole_tensor_has(
    monkeypatch: pytest.MonkeyPatch, at: int, value: float
) -> None:
    monkeypatch.setattr(beside, "PIECE_BYTES", 8)
    tensor = torch.arange(-1.0, 0.75, 0.25)
    tensor[at] = value
    found = measured(tensor)
    assert found.digest == hashlib.sha256(tensor.numpy().tobytes()).digest()
    same = pytest.approx(abs(value), rel=0, abs=0, nan_ok=True)
    assert found.largest == same and largest(tensor) == same


def test_a_copy_in_pieces_is_the_whole_copy_and_pauses_before_each(monkeypatch: pytest.MonkeyPatch) -> None:
    count: list[None] = []
    monkeypatch.setattr(beside, "PIECE_BYTES", 2 * 5 * 4)
    monkeypatch.setattr(tensors, "pause", lambda: count.append(None))
    source = torch.arange(35, dtype=torch.float32).view(7, 5)
    target = torch.empty(7, 10, dtype=torch.bfloat16)[:, 3:8]
    copy_in_pieces(target, source)
    assert torch.equal(target, source.to(torch.bfloat16))
    assert len(count) == 4


def test_threads_for_many_bytes_wait_for_the_engine_s_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    gave_way: list[str] = []
    monkeypatch.setattr(beside.BATCHES, "give_way", lambda: gave_way.append(threading.current_thread().name))
    for num_bytes in (LARGE_BYTES - 1, LARGE_BYTES):
        with thread_pool(f"kt-test-{num_bytes}", num_bytes) as threads:
            threads.submit(int).result(60)
    assert gave_way == [f"kt-test-{LARGE_BYTES}_0"]
