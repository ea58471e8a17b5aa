"""What `bench train` trains, and how it counts."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kt_runtime.bench.train.plan import Plan, sequences_of
from kt_runtime.bench.train.rows import Measured, Row
from kt_runtime.bench.train.server_side import ProcessTree, _batch, peak_bytes


@given(sequences=st.integers(1, 20), micro_batch=st.integers(1, 20))
def test_micro_batches_are_the_step(sequences: int, micro_batch: int) -> None:
    cuts = Plan(sequences=sequences, micro_batch=micro_batch).micro_batches()
    assert [index for first, end in cuts for index in range(first, end)] == list(range(sequences))
    assert max(end - first for first, end in cuts) <= micro_batch


def test_a_step_s_loss_is_the_mean_over_what_is_predicted() -> None:
    batch = _batch(sequences_of(Plan(sequences=3, tokens=5), 100))
    counted = batch.weights > 0
    assert batch.lengths == [5, 5, 5] and counted.sum() == 3 * 4
    assert float(batch.weights.sum()) == pytest.approx(1, abs=5e-7)  # 6e-8 measured
    assert np.array_equal(batch.targets[counted], batch.tokens[1:][counted[:-1]])


def test_figures_are_those_of_the_median_step() -> None:
    ours, theirs = Measured([2.0, 1.0, 4.0], [3.0], 10), Measured([4.0, 5.0, 9.0], [3.0], 40)
    row = Row("attention+experts", "retain", 100, ours, theirs, 60.0).as_json()
    assert row["tokens_per_s"] == 50 and row["tokens_per_s_best"] == 100
    assert row["ratio"] == 2.5 and row["memory_ratio"] == 0.25
    assert row["slower_than_attention"] == pytest.approx(1 / 6, rel=1e-15, abs=0)
    alone = Row("attention", "retain", 100, ours, None, None).as_json()
    assert alone["ratio"] is None and alone.keys() == row.keys()


def test_a_process_s_peak_is_known_and_that_of_those_it_started() -> None:
    script = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()  # Python runs in it
        tree = ProcessTree()
        tree.reset()
        assert child.pid in tree.processes and tree.peak_bytes() > 1 << 19
        child.communicate(b"\n")
    assert child.pid not in ProcessTree().processes
    assert peak_bytes(os.getpid()) > 1 << 20
    assert peak_bytes(2**22 + 1) == 0
