from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.wire.address import ipc_path, private_directory, runtime_directory


@pytest.fixture
def temporary(socket_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(socket_directory))
    return socket_directory


def test_runtime_directory_is_in_xdg_runtime_dir(socket_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_directory))
    assert runtime_directory() == socket_directory / "kt-runtime"
    assert stat.S_IMODE(runtime_directory().stat().st_mode) == 0o700


def test_runtime_directory_else_is_the_users_own_in_the_temporary_directory(temporary: Path) -> None:
    assert runtime_directory() == temporary / f"kt-runtime-{os.geteuid()}"
    assert stat.S_IMODE(runtime_directory().stat().st_mode) == 0o700


def test_a_missing_xdg_runtime_dir_is_not_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary / "missing"))
    assert runtime_directory().parent == temporary


def test_a_directory_planted_by_somebody_else_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = runtime_directory()
    directory.chmod(0o770)
    with pytest.raises(InvalidValueError, match="mode 0770"):
        runtime_directory()
    directory.rmdir()
    directory.symlink_to(temporary)
    with pytest.raises(InvalidValueError, match="symbolic links"):
        runtime_directory()
    directory.unlink()
    directory.write_text("")
    with pytest.raises(InvalidValueError, match="not a directory"):
        runtime_directory()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InvalidValueError, match=f"belongs to user {os.getuid()}, not to 12345"):
        private_directory(temporary)


def test_a_directory_whose_parent_is_missing_is_refused(socket_directory: Path) -> None:
    with pytest.raises(InvalidValueError, match="No such file"):
        private_directory(socket_directory / "a" / "b")


def test_a_path_longer_than_a_socket_may_have_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = temporary / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(InvalidValueError, match=r"107 bytes.*set XDG_RUNTIME_DIR or TMPDIR"):
        ipc_path(f"ipc://{runtime_directory() / 'resident-30000.sock'}")
    assert ipc_path("ipc:///" + "x" * 106)
    with pytest.raises(InvalidValueError, match="has 108"):
        ipc_path("ipc:///" + "ü" * 53 + "x")
