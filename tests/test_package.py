"""What a wheel and a source archive hold: each source file once, under its installed name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core", reason="scikit-build-core builds the package; make installs it")

ROOT = Path(__file__).resolve().parent.parent
NO_SOURCES = (".git", ".venv", "build", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "__pycache__")
FOLDERS = ("serve", "train", "sglang_patch", "configs")
BUILD = """
import sys
from scikit_build_core.build import build_sdist, build_wheel
name = build_sdist(sys.argv[1]) if sys.argv[2] == "sdist" else build_wheel(sys.argv[1], {"wheel.cmake": "false"})
"""


def sources() -> set[str]:
    """Paths inside kt_runtime, without caches and the compiled extension."""
    found = {"kt_runtime": ROOT / "kt_runtime", **{f"kt_runtime/{name}": ROOT / name for name in FOLDERS}}
    return {
        f"{inside}/{path.relative_to(top)}"
        for inside, top in found.items()
        for path in top.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources. A source archive is made of all files below: with the environment they are 140,000."""
    copy = tmp_path_factory.mktemp("package") / "checkout"
    return Path(shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NO_SOURCES)))


def build(kind: str, checkout: Path, directory: Path) -> Path:
    subprocess.run([sys.executable, "-P", "-c", BUILD, directory, kind], cwd=checkout, check=True, capture_output=True)
    (built,) = directory.iterdir()
    return built


@pytest.mark.slow
def test_a_wheel_holds_each_source_once(checkout: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel", checkout, tmp_path)) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted(sources())


@pytest.mark.slow
def test_a_source_archive_holds_each_source_once(checkout: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", checkout, tmp_path)) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    python = [name for name in names if name.startswith(("kt_runtime/", *(f"{folder}/" for folder in FOLDERS)))]
    assert sorted(python) == sorted(sources())
    assert {"CMakeLists.txt", "pyproject.toml", "csrc/bind/module.cpp"} < set(names)
