from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from kt_runtime.bench.scale.decoding import first_cores, limited_to, measure_ranks, row_of
from kt_runtime.bench.scale.plan import Plan
from kt_runtime.bench.serve.plan import Case
from kt_runtime.bench.serve.rows import Measured, TokenTime
from kt_runtime.bench.serve.server_side import Transcript
from kt_runtime.errors import InvalidValueError


def test_a_row_compares_medians_steps_and_tokens() -> None:
    ranks = Measured([8.0, 9.0, 30.0], token_times=[TokenTime(0.25, 0, 0), TokenTime(0.5, 0, 0)])
    one = Measured([10.0])
    row = row_of(
        Case("decode", 2),
        (ranks, Transcript([], [[[1, 2], [3, 4]]])),
        (one, Transcript([], [[[1, 2], [3, 5]]])),
    )
    assert (row["streams"], row["tokens_per_s"], row["ratio"], row["same_tokens"]) == (2, 9.0, 0.9, 0.75)
    assert (row["step_ms"], row["one_process_step_ms"]) == (375.0, None)


def test_more_ranks_than_cores_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    with (
        mock.patch.object(os, "sched_getaffinity", return_value={0}),
        pytest.raises(InvalidValueError, match="--ranks is 2: this process may use 1 cores; each rank needs one"),
    ):
        measure_ranks(Plan(ranks=2), "float32", tmp_path, lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_servers_run_on_the_first_cores_and_the_bench_gets_its_own_back() -> None:
    before = os.sched_getaffinity(0)
    (first, *_), all_of_first = sorted(before), first_cores(1)
    assert first in all_of_first
    with limited_to([first]):
        assert os.sched_getaffinity(0) == {first}
    assert os.sched_getaffinity(0) == before
