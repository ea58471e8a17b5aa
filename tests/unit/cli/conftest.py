"""The installed command line in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run("models", "--json", VARIABLE="value")`. Models are looked for in `tmp_path` only, and no server runs."""

    def run_command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        places = {
            "KT_RUNTIME_MODELS": str(tmp_path / "models"),
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "KT_RUNTIME_URL": "http://127.0.0.1:9",
            "COLUMNS": "160",
        }
        return subprocess.run(
            [sys.executable, "-m", "kt_runtime.cli.main", *arguments],
            cwd=tmp_path,
            env=os.environ | places | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run_command
