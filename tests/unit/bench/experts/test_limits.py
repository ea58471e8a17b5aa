from __future__ import annotations

import dataclasses

import pytest
from reference.instruction_sets import instruction_sets

from kt_runtime.bench.experts.limits import Limits, forward_work, last_level_cache_bytes, training_work
from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.experts import machine

LIMITS = Limits("x", 1, dram_bytes_per_s=10.0, bf16_flops=100.0, int8_ops=400.0)


@pytest.mark.parametrize("isa", instruction_sets())
def test_every_instruction_set_has_limits_that_a_processor_can_have(isa: str) -> None:
    with_two = machine.read_rate(isa, 2, 64 << 20)
    assert 1e8 < with_two < 1e13
    for operation in ("bf16", "int8"):
        assert 1e8 < machine.peak_rate(isa, operation, 1) < 1e14


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(InvalidValueError, match="num_threads is 0"):
        machine.peak_rate("portable", "bf16", 0)
    with pytest.raises(InvalidValueError, match="bytes is 4096; allowed: 65536 or more on 2 threads"):
        machine.read_rate("portable", 2, 4096)
    with pytest.raises(UnknownNameError, match="nosuch"):
        machine.read_rate("nosuch", 1, 1 << 20)


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
