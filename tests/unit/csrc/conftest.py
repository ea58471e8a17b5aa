"""The C++ test program in build/test: what was compiled stays, and the next run compiles what has changed."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def cmake() -> str:
    found = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    assert found is not None, "cmake is needed to build the C++ tests: pip install 'kt-runtime[test]' brings it"
    return found


@pytest.fixture(scope="session")
def lock() -> Iterator[None]:
    """Another run of the tests waits, and finds compiled what this one has compiled."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "test.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def compiled(cmake: str, lock: None) -> Path | None:
    """The build tree of the editable installation, up to date: the tests link its library, which is the one that users
    run. None if there is no such installation."""
    trees = sorted((ROOT / "build").glob("editable-*/libkt_experts_core.a"), key=lambda each: each.stat().st_mtime)
    if not trees:
        return None
    tree = trees[-1].parent
    run(cmake, "--build", str(tree), "--parallel", "2", "--target", "kt_experts_core")
    return tree


@pytest.fixture(scope="session")
def build_directory(cmake: str, lock: None, compiled: Path | None) -> Path:
    build = ROOT / "build" / "test"
    options = ["-DKT_BUILD_PYTHON=OFF", "-DKT_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    run(cmake, "-S", str(ROOT), "-B", str(build), *options, f"-DKT_COMPILED={compiled or ''}")
    run(cmake, "--build", str(build), "--parallel", "2")
    return build


@pytest.fixture(scope="session")
def library_directory(build_directory: Path, compiled: Path | None) -> Path:
    """The build tree with the objects of the library."""
    return compiled or build_directory


@pytest.fixture(scope="session")
def program(build_directory: Path) -> Path:
    return build_directory / "tests" / "unit" / "csrc" / "kt_kernel_tests"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
