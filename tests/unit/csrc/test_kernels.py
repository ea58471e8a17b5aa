"""Builds the C++ test program, runs it on every instruction set of this machine and on the model of AMX's tiles.

What the objects compiled for an instruction set give the linker is tested here too, on the same build: nothing that
other code could take for its own. Of a weak symbol (an inline function, a template) that several objects define, the
linker keeps one. If that is a copy from an object compiled for AVX-512, every processor without it fails in code that
has nothing to do with the kernels.
"""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest

from kt_runtime.experts import available_isas

CHECKS = (Path(__file__).parent / "checks.h").read_text(encoding="utf-8")
TESTS = set(re.findall(r"^void test_(\w+)\(const kt::Tiles&", CHECKS, re.MULTILINE))
ISAS = {"avx2": "Avx2", "avx512_base": "Avx512(Base|Vnni)", "avx512": "Avx512", "amx": "Amx"}
# Data of the standard library that is the same in every object (the pointer to its routine for exceptions, objects
# without members such as std::ranges::copy); there are no instructions in it.
HARMLESS = re.compile(r"[VC] (DW\.ref\.__gxx_personality_v0|std::.*)")


def run(program: Path, *arguments: str) -> tuple[int, str]:
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=1800, check=False)
    return result.returncode, result.stdout


@pytest.fixture(scope="module")
def of_all(program: Path) -> tuple[int, str]:
    """Status and output of a run on all instruction sets, in one process: what it has computed in float64 for one of
    them serves the others."""
    return run(program)


@pytest.mark.parametrize("isa", [*available_isas(), "amx-model"])
def test_kernels_agree_with_double_precision(of_all: tuple[int, str], isa: str) -> None:
    _, output = of_all
    assert re.search(rf"^isa {isa}: [1-9]\d* checks, 0 failures$", output, re.MULTILINE), output
    ran = set(re.findall(rf"^{isa} (\w+): \d+ checks, 0 failures, ", output, re.MULTILINE))
    assert ran == TESTS, "a test of an instruction set did not run"


def test_a_tolerance_is_at_most_ten_times_the_largest_error(of_all: tuple[int, str]) -> None:
    """Of each gate, a line with a tolerance, on the instruction set that needs it most. The portable kernels and AMX's
    on the model run everywhere, and need 0.128 of a gate or more. What is always exact is compared as bits."""
    _, output = of_all
    found = re.findall(r"^\S+ gate (\S+ within \S+): errors up to ([\d.]+) of", output, re.MULTILINE)
    largest: dict[str, float] = {}
    for gate, share in found:
        largest[gate] = max(largest.get(gate, 0.0), float(share))
    assert len(largest) >= 48, output
    too_wide = {gate: share for gate, share in largest.items() if share < 0.1}
    assert not too_wide


def test_all_of_the_program_passed(of_all: tuple[int, str]) -> None:
    """Also what needs no instruction set: threads, the plan of who computes what, fp16."""
    status, output = of_all
    assert status == 0 and output.endswith("\npassed\n"), output


def test_an_instruction_set_that_cannot_run_fails_and_lists_those_that_can(program: Path) -> None:
    status, output = run(program, "--isa", "avx1024")
    assert status == 1
    assert "instruction set 'avx1024' is unknown; available: " + ", ".join(available_isas()) in output


@pytest.mark.skipif("amx" in available_isas(), reason="this machine has AMX")
def test_the_lane_for_amx_fails_where_there_is_none(program: Path) -> None:
    status, output = run(program, "--isa", "amx")
    assert status == 1
    assert "instruction set 'amx' is not available on this machine" in output


def defined_symbols(path: Path) -> list[tuple[str, str]]:
    """(type as nm prints it, name); capital letters, V, W and u are visible to the linker."""
    listed = subprocess.run(["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    return [(match[1], match[2]) for match in re.finditer(r"^[0-9a-f]+ (\S) (.+)$", listed, re.MULTILINE)]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the kernels are those of x86-64")
@pytest.mark.parametrize("isa", ISAS)
def test_objects_of_an_instruction_set_share_nothing(library_directory: Path, isa: str) -> None:
    objects = sorted(library_directory.glob(f"CMakeFiles/kt_experts_core.dir/csrc/kernels/{isa}/**/*.o"))
    assert len(objects) >= 5
    own = re.compile(rf"(typeinfo (name )?for )?kt::({isa}::|k{ISAS[isa]}(Tiles|Peaks)$)")
    shared, kept = [], 0
    for path in objects:
        for kind, name in defined_symbols(path):
            if not (kind.isupper() or kind in "uvw") or HARMLESS.fullmatch(f"{kind} {name}"):
                continue
            kept += 1
            if kind in "WVuvw" or not own.match(name):
                shared.append(f"{path.name}: {kind} {name}")
    assert not shared, "\n".join(shared)
    assert kept >= 5
