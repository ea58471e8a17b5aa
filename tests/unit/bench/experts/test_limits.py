from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from reference.instruction_sets import instruction_sets

from kt_runtime.bench.experts.checkpoint import prefix, write_checkpoint
from kt_runtime.bench.experts.layer_case import LayerCase
from kt_runtime.bench.experts.limits import (
    LARGEST_READ_BUFFER_BYTES,
    Limits,
    forward_work,
    last_level_cache_bytes,
    memory_reader,
    training_work,
)
from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.experts import ExpertShape, ExpertStore, machine

LIMITS = Limits("x", 1, dram_bytes_per_s=10.0, bf16_flops=100.0, int8_ops=400.0)


@pytest.mark.slow
@pytest.mark.parametrize("isa", instruction_sets())
def test_every_instruction_set_has_limits_that_a_processor_can_have(isa: str) -> None:
    assert all(1e8 < machine.MemoryReader(64 << 20).rate(isa, threads) < 1e13 for threads in (1, 2))
    for operation in ("bf16", "int8"):
        assert 1e8 < machine.peak_rate(isa, operation, 1, passes=5) < 1e14


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(InvalidValueError, match="num_threads is 0"):
        machine.peak_rate("portable", "bf16", 0)
    with pytest.raises(InvalidValueError, match=r"bytes is 4095; allowed: \d+ to 1099511627776"):
        machine.MemoryReader(4095)
    reader = machine.MemoryReader(1 << 20)
    with pytest.raises(UnknownNameError, match="nosuch"):
        reader.rate("nosuch", 1)
    with pytest.raises(InvalidValueError, match="num_threads is 0"):
        reader.rate("portable", 0)


@pytest.mark.slow
def test_a_pass_reads_a_quarter_and_replaces_what_the_last_cache_held() -> None:
    assert machine.MemoryReader(64 << 20).bytes_at_once == 16 << 20
    reader = memory_reader()
    assert reader.bytes_at_once >= min(last_level_cache_bytes(), LARGEST_READ_BUFFER_BYTES // 4) * 0.99


def test_workers_that_are_kept_awake_compute_and_sleep_again(case: LayerCase, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bf16", case.weights)
    sizes = ExpertShape(case.shape.num_experts, case.shape.hidden, case.shape.intermediate)
    store, batch = ExpertStore.load(tmp_path, {0: prefix("bf16")}, sizes, num_threads=2), case.few(4)
    asleep = store.layers[0].forward(batch.x, batch.ids, batch.weights)
    with machine.workers_awake():
        assert torch.equal(store.layers[0].forward(batch.x, batch.ids, batch.weights), asleep)
    assert torch.equal(store.layers[0].forward(batch.x, batch.ids, batch.weights), asleep)


def test_reading_or_computing_bounds_a_forward_whichever_takes_longer() -> None:
    assert forward_work(50.0, 100.0, "bf16").limit(LIMITS) == (5.0, "dram")
    assert forward_work(5.0, 200.0, "bf16").limit(LIMITS) == (2.0, "bf16")
    assert forward_work(5.0, 800.0, "int8").limit(LIMITS) == (2.0, "int8")


def test_backward_is_one_more_forward_and_recomputing_two_thirds() -> None:
    assert training_work(3.0, 300.0, "bf16", recomputed=False).limit(LIMITS) == (6.0, "bf16")
    assert training_work(3.0, 300.0, "bf16", recomputed=True).limit(LIMITS)[0] == 8.0
    assert training_work(30.0, 3.0, "bf16", recomputed=False).limit(LIMITS) == (6.0, "dram")


def test_backward_of_integer_weights_is_held_against_the_bf16_peak() -> None:
    work = training_work(0.0, 400.0, "int8", recomputed=False)
    assert work.limit(LIMITS) == (1.0 + 4.0, "bf16")


def test_limits_are_of_the_threads_that_they_say() -> None:
    assert [field.name for field in dataclasses.fields(Limits)][:2] == ["isa", "threads"]
    assert last_level_cache_bytes() >= 0
