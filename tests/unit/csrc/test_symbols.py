"""What the objects compiled for an instruction set give the linker: nothing that other code could take for its own.

Of a weak symbol (an inline function, a template) that several objects define, the linker keeps one. If that is a copy
from an object compiled for AVX-512, every processor without it fails in code that has nothing to do with the kernels.
"""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest

ISAS = {"avx2": "Avx2", "avx512": "Avx512", "amx": "Amx"}
# Data of the standard library that is the same in every object (the pointer to its routine for exceptions, objects
# without members such as std::ranges::copy); there are no instructions in it.
HARMLESS = re.compile(r"[VC] (DW\.ref\.__gxx_personality_v0|std::.*)")

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the kernels are those of x86-64")


def defined_symbols(path: Path) -> list[tuple[str, str]]:
    """(type as nm prints it, name); capital letters, V, W and u are visible to the linker."""
    listed = subprocess.run(["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    return [(match[1], match[2]) for match in re.finditer(r"^[0-9a-f]+ (\S) (.+)$", listed, re.MULTILINE)]


@pytest.mark.parametrize("isa", ISAS)
def test_objects_of_an_instruction_set_share_nothing(build_directory: Path, isa: str) -> None:
    objects = sorted(build_directory.glob(f"CMakeFiles/kt_experts_core.dir/csrc/kernels/{isa}/*.o"))
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
