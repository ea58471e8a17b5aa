"""The installed command line in a process of its own, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.bench.page.measurement import Measurement, read_all
from kt_runtime.bench.page.report import record_report

Run = Callable[..., subprocess.CompletedProcess[str]]
Recorded = Callable[[dict[str, Any]], Measurement]


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


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """A bench's report as `kt-runtime bench record` writes it and the page's generator reads it."""

    def record(report: dict[str, Any]) -> Measurement:
        path, directory = tmp_path / "report.json", tmp_path / "measurements"
        path.write_text(json.dumps(report))
        directory.mkdir()
        origin = dict.fromkeys(("title", "machine", "hardware", "ran", "commit"), "x")
        record_report(path, directory, "one", origin | {"date": "2026-01-31"})
        return read_all(directory)["one"]

    return record
