"""Where metrics are shared: in memory with room, and nowhere else; what killed servers left is removed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kt_runtime.serve.metrics_directory import metrics_directory

HOLDER = """
import signal, sys
from pathlib import Path
from kt_runtime.serve.metrics_directory import metrics_directory
with metrics_directory(Path(sys.argv[1]), 0) as path:
    (path / "counter_1.db").write_bytes(b"x")
    print(path, flush=True)
    signal.pause()
"""


def base(memory: Path) -> Path:
    return memory / f"kt-runtime-{os.geteuid()}"


def test_the_directory_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with metrics_directory(tmp_path, 0) as path:
        assert path is not None and path.parent == base(tmp_path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700 and not list(path.iterdir())
        (path / "counter_1.db").write_bytes(b"x")
    assert not list(base(tmp_path).iterdir())


def test_without_room_or_a_file_system_there_is_none(tmp_path: Path) -> None:
    with metrics_directory(tmp_path, 1 << 62) as path:
        assert path is None
    with metrics_directory(tmp_path / "missing", 0) as path:
        assert path is None
    assert not list(tmp_path.iterdir())


def test_anothers_directory_is_not_used(tmp_path: Path) -> None:
    base(tmp_path).mkdir(mode=0o755)
    base(tmp_path).chmod(0o755)
    with metrics_directory(tmp_path, 0) as path:
        assert path is None


def test_an_error_in_the_block_is_passed_on_and_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="of the server"), metrics_directory(tmp_path, 0):
        raise OSError("of the server")
    assert not list(base(tmp_path).iterdir())


@pytest.mark.slow
def test_a_running_servers_directory_stays_and_a_killed_ones_is_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        others = Path(holder.stdout.readline().strip())
        with metrics_directory(tmp_path, 0):
            assert (others / "counter_1.db").exists()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert others.exists()
    with metrics_directory(tmp_path, 0) as path:
        assert path is not None
        assert [each for each in base(tmp_path).iterdir() if each.is_dir()] == [path]
