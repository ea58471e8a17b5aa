"""The C++ test program, built once for all tests of a session."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def build_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    assert cmake is not None, "cmake is needed to build the C++ tests: pip install 'kt-runtime[test]' brings it"
    build = tmp_path_factory.mktemp("csrc") / "build"
    options = ["-DKT_BUILD_PYTHON=OFF", "-DKT_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run([cmake, "-S", ROOT, "-B", build, *options], check=True, capture_output=True, text=True)
    built = subprocess.run([cmake, "--build", build, "--parallel", "2"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return build


@pytest.fixture(scope="session")
def program(build_directory: Path) -> Path:
    return build_directory / "tests" / "unit" / "csrc" / "kt_kernel_tests"
