"""The directory of adapter versions before the server starts. What fails later: tests/unit/resident."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.serve.adapter_directory import adapter_directory, check_adapters, claimed_adapters

HOLDER = """
import sys
from pathlib import Path
from kt_runtime.serve.adapter_directory import claimed_adapters
with claimed_adapters(Path(sys.argv[1]), Path(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    return adapter_directory(tmp_path / "adapters", tmp_path)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Lets a function of `os` fail for paths in which `.tmp-` or "bob" occurs, as for a user without the right."""

    def begin(function: str, number: int) -> None:
        original = getattr(os, function)

        def failing(path: Any, *args: Any, **kwargs: Any) -> Any:
            if ".tmp-" in str(path) or str(path).endswith("bob"):
                raise OSError(number, os.strerror(number), str(path))
            return original(path, *args, **kwargs)

        monkeypatch.setattr(os, function, failing)

    return begin


def test_the_default_directory_belongs_to_one_model_and_one_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    found = {adapter_directory(None, Path(path)) for path in ("/models/a", "/models/b", "/other/a")}
    assert len(found) == 3 and all(path.parent == tmp_path / "kt-runtime" / "adapters" for path in found)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in found)


def test_a_directory_that_can_not_be_made_or_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValueError, match=r"--adapter-dir .*file: can't be created"):
        adapter_directory(tmp_path / "file", tmp_path)
    if os.geteuid() == 0:
        return  # who may do everything is refused nothing
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(InvalidValueError, match="may not read and write there"):
        adapter_directory(tmp_path / "closed", tmp_path)


def test_existing_permissions_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o750)
    os.chmod(tmp_path / "shared", 0o750)
    assert stat.S_IMODE(adapter_directory(tmp_path / "shared", tmp_path).stat().st_mode) == 0o750


def test_a_second_server_is_refused_with_the_holder_whatever_its_runtime_directory(
    adapters: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-P", "-c", HOLDER, str(adapters), str(tmp_path / "one")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        (tmp_path / "link").symlink_to(adapters)
        for path, runtime in ((adapters, "one"), (adapters, "two"), (tmp_path / "link", "two")):
            with (
                pytest.raises(ConflictError, match=rf"--adapter-dir .* is in use by process {holder.pid}: one server"),
                claimed_adapters(path, tmp_path / runtime),
            ):
                raise AssertionError("claimed twice")
        holder.kill()
    with claimed_adapters(adapters, tmp_path / "two"):
        pass  # the kernel has released it


def test_a_full_disk_keeps_no_server_from_starting(
    adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def full(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(f"{adapters}/") and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", full)
    with claimed_adapters(adapters, tmp_path):
        (note,) = check_adapters(adapters)
        assert "is full" in note and "written down when there is room" in note
        with pytest.raises(ConflictError, match="in use"), claimed_adapters(adapters, tmp_path):
            raise AssertionError("claimed twice")


def test_what_was_left_half_written_is_removed(adapters: Path) -> None:
    (adapters / "bob" / ".tmp-a").mkdir(parents=True)
    (adapters / "bob" / ".tmp-a" / "half").write_text("x")
    (adapters / ".tmp-b").write_text("x")
    assert check_adapters(adapters) == []
    assert [path.name for path in adapters.rglob("*")] == ["bob"]


def test_what_can_not_be_removed_or_read_is_told_and_nothing_else_happens(
    adapters: Path, refuse: Callable[[str, int], None]
) -> None:
    (adapters / "bob").mkdir()
    (adapters / ".tmp-b").write_text("x")
    refuse("unlink", errno.EPERM)
    refuse("listdir", errno.EACCES)
    first, second, third = check_adapters(adapters)
    assert "can't be removed: Operation not permitted" in third
    assert ".tmp-b: left half written by an earlier server, and can't be removed: Operation not permitted" in first
    assert "bob: can't be read: Permission denied" in second
    assert (adapters / ".tmp-b").exists()


def test_a_directory_that_can_not_be_listed_is_refused(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "iterdir", broken)
    with pytest.raises(InvalidValueError, match=r"--adapter-dir .*: can't be read \(Input/output error\)"):
        check_adapters(adapters)
