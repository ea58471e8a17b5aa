from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kt_runtime.bench.experts.kt_kernel import KtKernel
from kt_runtime.bench.experts.layer_case import LayerCase, relative_error
from kt_runtime.bench.experts.peers import forward_peers, training_peers
from kt_runtime.errors import NotFoundError

TOLERANCES = {"bf16": 0.01, "int8": 0.05, "int4": 0.3, "int4_g32": 0.3, "int4_g128": 0.35}


@pytest.mark.parametrize("name", TOLERANCES)
def test_pytorchs_ways_compute_the_same_layer(case: LayerCase, name: str) -> None:
    made = forward_peers(case.weights, name)
    assert made
    for peer, forward in made.items():
        error = relative_error(forward(case.few(16)), case.expected(16))
        assert error < TOLERANCES[name], peer


def test_pytorch_has_nothing_for_fp8_in_blocks(case: LayerCase) -> None:
    assert forward_peers(case.weights, "fp8") == {}


def test_pytorchs_backward_runs(case: LayerCase) -> None:
    training_peers(case.weights, "bf16", case.lora)["torch_autograd"](case.batches(16)[0])


def test_an_interpreter_without_kt_kernel_is_said_to_have_none() -> None:
    peer = KtKernel(Path(sys.executable))
    assert peer.problem is not None and "No module named 'kt_kernel'" in peer.problem
    assert peer.encoding("bf16") is None


def test_a_program_that_is_no_interpreter_is_a_problem_not_a_crash() -> None:
    peer = KtKernel(Path("/bin/false"))
    assert peer.problem is not None and "status 1" in peer.problem


def test_a_missing_interpreter_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no such file"):
        KtKernel(tmp_path / "python")
