"""`make demo` on a machine that lacks something says what to install, before anything is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
NOT_INSTALLED = {"wandb"}  # an extra of users, which no test uses
TOOLS = ("sh", "make", "find", "env", "echo", "test", "touch", "getconf")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """The only directory that programs are found in."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None or name in ("echo", "test"), name
        if found is not None:
            (directory / name).symlink_to(found)
    return directory


def program(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(f"#!/bin/sh\n{text}\n")
    (directory / name).chmod(0o755)


def make_demo(tmp_path: Path, tools: Path) -> str:
    """Standard output: the one line. Make adds its own to stderr."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(
        [tools / "make", "demo"], cwd=tmp_path, env={"PATH": str(tools)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and not (tmp_path / ".venv").exists()
    (line,) = done.stdout.splitlines()
    return line


def python(tools: Path, *without: str) -> None:
    """This interpreter, except that code which names one of `without` fails."""
    cases = "".join(f"*{text}*) exit 1;; " for text in without)
    program(tools, "python3", f'case "$*" in {cases}esac\nexec {sys.executable} "$@"')


def test_no_python(tmp_path: Path, tools: Path) -> None:
    assert "there is no 'python3': install python3" in make_demo(tmp_path, tools)


def test_no_virtual_environments(tmp_path: Path, tools: Path) -> None:
    python(tools, "ensurepip")
    assert "apt install python3-venv" in make_demo(tmp_path, tools)


def test_no_python_header(tmp_path: Path, tools: Path) -> None:
    python(tools, "Python.h")
    assert "apt install python3-dev" in make_demo(tmp_path, tools)


@pytest.mark.parametrize("compiler", [None, "exit 1"])
def test_no_compiler_or_one_that_is_too_old(tmp_path: Path, tools: Path, compiler: str | None) -> None:
    program(tools, "python3", f'case "$*" in *Python.h*) exit 0;; esac\nexec {sys.executable} "$@"')
    if compiler is not None:
        program(tools, "c++", compiler)
    line = make_demo(tmp_path, tools)
    assert "need a C++20 compiler" in line and "apt install g++" in line


def test_with_all_of_it_the_environment_is_made(tmp_path: Path, tools: Path) -> None:
    """The interpreter here stops at the first step that would install something."""
    skipped = 'case "$*" in *Python.h*) exit 0;; "-m venv"*) echo "asked for: $*"; exit 2;; esac'
    program(tools, "python3", f'{skipped}\nexec {sys.executable} "$@"')
    program(tools, "c++", "exit 0")
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(
        [tools / "make", "demo"], cwd=tmp_path, env={"PATH": str(tools)}, capture_output=True, text=True
    )
    assert "asked for: -m venv .venv" in done.stdout, done


def test_constraints_name_a_version_of_each_dependency() -> None:
    """What pyproject.toml asks for and constraints.txt lacks, pip would choose by trying releases."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    optional = [text for texts in project["project"]["optional-dependencies"].values() for text in texts]
    wanted = [Requirement(text) for text in (*project["project"]["dependencies"], *optional)]
    wanted += [Requirement(text) for text in project["build-system"]["requires"]]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in pinned}
    assert len(versions) == len(pinned), "a package has two lines"
    for each in wanted:
        if each.name != "kt-runtime" and each.name not in NOT_INSTALLED:
            assert each.specifier.contains(versions.get(canonicalize_name(each.name), "")), f"{each} in constraints.txt"
