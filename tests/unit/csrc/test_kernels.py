"""Builds the C++ test program, runs it on every instruction set of this machine and on the model of AMX's tiles."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kt_runtime.experts import available_isas

CHECKS = (Path(__file__).parent / "checks.h").read_text(encoding="utf-8")
TESTS = set(re.findall(r"^void test_(\w+)\(const kt::Tiles&", CHECKS, re.MULTILINE))


def run(program: Path, *arguments: str) -> tuple[int, str]:
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600, check=False)
    return result.returncode, result.stdout


@pytest.mark.parametrize("isa", [*available_isas(), "amx-model"])
def test_kernels_agree_with_double_precision(program, isa):
    status, output = run(program, "--isa", isa)
    assert status == 0, output
    assert f"isa {isa}:" in output and "\npassed\n" in output
    used = dict(re.findall(rf"^{isa} (\w+): \d+ checks, errors up to ([\d.]+) of", output, re.MULTILINE))
    too_wide = {test: share for test, share in used.items() if 0 < float(share) < 0.1}
    assert used.keys() == TESTS, "a test of an instruction set did not run"
    assert not too_wide, "a tolerance is at most ten times the largest error"


def test_an_instruction_set_that_cannot_run_fails_and_lists_those_that_can(program):
    status, output = run(program, "--isa", "avx1024")
    assert status == 1
    assert "instruction set 'avx1024' is unknown; available: " + ", ".join(available_isas()) in output


@pytest.mark.skipif("amx" in available_isas(), reason="this machine has AMX")
def test_the_lane_for_amx_fails_where_there_is_none(program):
    status, output = run(program, "--isa", "amx")
    assert status == 1
    assert "instruction set 'amx' is not available on this machine" in output
