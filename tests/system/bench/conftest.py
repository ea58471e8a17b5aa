"""`kt-runtime bench` in this process, whose servers are forks (forked_server.py), and what its report becomes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.server.command_line import run_command

from kt_runtime.bench.experts import limits
from kt_runtime.bench.page.measurement import Measurement, read_all
from kt_runtime.bench.page.report import record_report

BenchOutput = Callable[..., tuple[str, str]]
Recorded = Callable[[dict[str, Any]], Measurement]


@pytest.fixture(scope="module")
def bench_output(tmp_path_factory: pytest.TempPathFactory) -> BenchOutput:
    """`bench_output("experts", "--runs", "1")`: what it prints. Asserts that no temporary file is left."""
    directory = tmp_path_factory.mktemp("bench")

    def run(*arguments: str) -> tuple[str, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(directory))
            measure_limits_briefly(patch)
            done = run_command("bench", *arguments, directory=directory)
        assert done.returncode == 0, done.stderr
        left = [path for path in directory.iterdir() if not path.name.startswith("torchinductor_")]  # PyTorch's own
        assert not left, "temporary files are left"
        return done.stdout, done.stderr

    return run


def measure_limits_briefly(patch: pytest.MonkeyPatch) -> None:
    """In all ways, but not for seconds: whether a pass of the memory reader replaces what the caches hold is shown by
    tests/unit/bench/experts/test_limits.py."""
    patch.setattr(limits, "LARGEST_READ_BUFFER_BYTES", 64 << 20)
    patch.setattr(limits, "READ_PASSES", 3)
    patch.setattr(limits, "PEAK_PASSES", 3)


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
