"""GPU tests are collected where torch sees a CUDA device; elsewhere the run says that they were not."""

from __future__ import annotations

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_report_header() -> str | None:
    if torch.cuda.is_available():
        return None
    return "tests/gpu: not collected, torch sees no CUDA device"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not torch.cuda.is_available():
        terminalreporter.write_line("tests/gpu: not collected, torch sees no CUDA device")
