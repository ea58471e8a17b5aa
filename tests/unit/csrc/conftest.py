"""The C++ test program in build/test: what was compiled stays, and the next run compiles what has changed."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def build_directory() -> Path:
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    assert cmake is not None, "cmake is needed to build the C++ tests: pip install 'kt-runtime[test]' brings it"
    build = ROOT / "build" / "test"
    build.mkdir(parents=True, exist_ok=True)
    options = ["-DKT_BUILD_PYTHON=OFF", "-DKT_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure, compile_all = (
            ["-S", str(ROOT), "-B", str(build), *options],
            ["--build", str(build), "--parallel", "2"],
        )
        for arguments in (configure, compile_all):
            done = subprocess.run([cmake, *arguments], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return build


@pytest.fixture(scope="session")
def program(build_directory: Path) -> Path:
    return build_directory / "tests" / "unit" / "csrc" / "kt_kernel_tests"
