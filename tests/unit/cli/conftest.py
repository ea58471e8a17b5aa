"""The command line, called in this process and as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from reference.server.command_line import run_command

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Environment variables: models are looked for in `tmp_path` only, no server runs, and tables are wide."""
    return {
        "KT_RUNTIME_MODELS": str(tmp_path / "models"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "KT_RUNTIME_URL": "http://127.0.0.1:9",
        "COLUMNS": "160",
    }


@pytest.fixture
def run(tmp_path: Path, places: dict[str, str]) -> Run:
    """`run("models", "--json", VARIABLE="value")` in `tmp_path`, in this process, which has imported torch already."""

    def run_here(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", places["HF_HUB_CACHE"])  # read at its import
            return run_command(*arguments, directory=tmp_path, environment=places | variables)

    return run_here


@pytest.fixture
def run_process(tmp_path: Path, places: dict[str, str]) -> Run:
    """As `run`, in a process of its own, as a user starts it."""

    def run_there(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kt_runtime.cli.main", *arguments],
            cwd=tmp_path,
            env=os.environ | places | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run_there
