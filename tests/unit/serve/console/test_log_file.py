"""The file behind stdout and stderr, in a process of its own: this one's belong to pytest."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kt_runtime.serve.console.log_file import LogFile

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from kt_runtime.serve.console.log_file import LogFile
log = LogFile(Path(sys.argv[1]))
print("before")
log.redirect()
print("ours", flush=True)
subprocess.run([sys.executable, "-c", "import os; os.write(2, b'a child\\\\n')"], check=True)
os.write(1, b"raw\\n")
log.restore()
log.restore()
print("after")
"""


def test_everything_written_meanwhile_is_in_the_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "before\nafter\n", "")
    assert path.read_text() == "ours\na child\nraw\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.fixture
def log(tmp_path: Path) -> LogFile:
    return LogFile(tmp_path / "serve.log", most_bytes=1000)


def append(log: LogFile, text: str) -> None:
    """As another process does it that inherited the descriptor."""
    with log.path.open("a") as opened:
        opened.write(text)


def test_lines_are_given_once_and_whole(log: LogFile) -> None:
    append(log, "one\ntwo\nthr")
    assert log.new_lines() == ["one", "two"]
    assert log.new_lines() == []
    append(log, "ee\n")
    assert log.new_lines() == ["three"]


def test_it_is_bounded_and_the_part_before_is_kept(log: LogFile) -> None:
    seen = []
    for number in range(100):
        append(log, f"line {number} {'x' * 90}\n")
        seen += log.new_lines()
    assert len(seen) == 100
    before = log.path.with_name("serve.log.1")
    assert log.path.stat().st_size <= 1100 and before.stat().st_size <= 1100
    kept = before.read_text() + log.path.read_text()
    assert [line[:7].strip() for line in kept.splitlines()][-1] == "line 99" and "\0" not in kept


def test_the_log_of_the_server_before_is_kept_beside_it(log: LogFile) -> None:
    append(log, "the crash\n")
    second = LogFile(log.path)
    assert second.tail(5) == [] and log.path.with_name("serve.log.1").read_text() == "the crash\n"


def test_tail_is_the_last_lines_with_something_in_them(log: LogFile) -> None:
    append(log, "".join(f"{number}\n\n" for number in range(50)))
    assert log.tail(3) == ["47", "48", "49"]


def test_bytes_that_are_no_text_do_not_stop_reading(log: LogFile) -> None:
    descriptor = os.open(log.path, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b"\xff\xfe\n")
    os.close(descriptor)
    assert len(log.new_lines()) == 1


def test_log_stays_bounded_where_the_part_before_can_not_be_kept(log: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("kt_runtime.serve.console.log_file.shutil.copyfile", full)
    append(log, "x" * 1500 + "\n")
    assert log.new_lines() == ["x" * 1500] and log.path.stat().st_size == 0
    append(log, "next\n")
    assert log.new_lines() == ["next"]
