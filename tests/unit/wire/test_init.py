from __future__ import annotations

import subprocess
import sys

from kt_runtime import wire


def test_every_exported_name_is_there() -> None:
    assert sorted(wire.__all__) == wire.__all__
    for name in wire.__all__:
        assert hasattr(wire, name)


def test_the_wire_loads_neither_torch_nor_sglang_nor_transformers() -> None:
    program = "import sys, kt_runtime.wire; print(sorted({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
