"""The console around a log that processes write to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kt_runtime.serve.console.console import CONFIG_VARIABLE, Console

PROGRAM = """
import os, sys
from pathlib import Path
from kt_runtime.errors import RuntimeFault
from kt_runtime.serve.console.console import opened_console, terminal
out = terminal()
with opened_console(lambda line: print(line, file=out, flush=True), Path(sys.argv[1]), 7, "info",
                    verbose=sys.argv[2] == "verbose") as console:
    print("chatter", flush=True)
    os.system("echo '2026-01-02 03:04:05,678 WARNING some.module[9]: take care' >&2")
    console.say("of our own")
    if sys.argv[3] == "fails":
        raise RuntimeFault("broken")
print("the end")
"""


def run(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", PROGRAM, str(directory), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != CONFIG_VARIABLE} | variables
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_terminal_has_our_lines_and_warnings_and_the_file_all(tmp_path: Path) -> None:
    done = run(tmp_path, "quiet", "ends")
    log = tmp_path / "serve-7.log"
    assert done.returncode == 0 and done.stderr == ""
    first, *rest, last = done.stdout.splitlines()
    assert (first, last) == (f"the full log is {log}", "the end")
    assert sorted(rest) == ["of our own", "warning: take care"]
    assert "chatter" in log.read_text() and list(tmp_path.glob("*.json")) == []


def test_a_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    done = run(tmp_path, "quiet", "fails")
    assert f"the end of {tmp_path / 'serve-7.log'}:\n  | chatter\n" in done.stdout
    assert done.stderr.endswith("RuntimeFault: broken\n")  # stderr is the terminal's again


@pytest.mark.parametrize(("mode", "variables"), [("verbose", {}), ("quiet", {CONFIG_VARIABLE: "/mine.json"})])
def test_nothing_is_kept_back_where_the_user_wants_to_see_all(
    tmp_path: Path, mode: str, variables: dict[str, str]
) -> None:
    done = run(tmp_path, mode, "ends", **variables)
    assert "chatter" in done.stdout and "WARNING some.module" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    def gone(line: str) -> None:
        raise BrokenPipeError

    Console(gone).say("line")


def test_the_configuration_is_one_that_sglang_reads(tmp_path: Path) -> None:
    from kt_runtime.serve.console.records import logging_config

    assert json.loads(json.dumps(logging_config("debug")))["root"]["level"] == "DEBUG"
