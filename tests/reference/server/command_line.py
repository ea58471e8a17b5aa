"""`kt-runtime` in this process, which has imported already what the command imports."""

from __future__ import annotations

import io
import signal
import subprocess
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from kt_runtime.cli.main import main


def run_command(
    *arguments: str, directory: Path, environment: Mapping[str, str] | None = None, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """`text`: standard input. Directory, `environment` and the handler of SIGTERM are restored afterwards."""
    out, err, on_sigterm = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        patch.setattr("sys.stdin", io.StringIO(text))
        patch.chdir(directory)
        try:
            status = main(arguments)
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
