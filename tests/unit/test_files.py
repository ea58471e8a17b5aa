from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kt_runtime import files
from kt_runtime.errors import ConflictError, NumericsError
from kt_runtime.files import (
    TEMPORARY_PREFIX,
    exclusive_lock,
    lock_holder,
    move_directory,
    only_files,
    visible_entries,
    write_directory,
    write_file,
    write_json,
    write_new_file,
)


def anything(old: Path, shown: Path) -> None:
    """A `MayReplace` that allows all."""


# Runs `operation` in a child that kills itself at the nth line executed in files.py, shutil.py or the operation
# itself, for n = 1, 2, ... until the operation gets to its end; prints what each death left behind as JSON.
KILL_AT_EVERY_LINE = """
import json, os, signal, shutil, sys, tempfile
from pathlib import Path
from kt_runtime import files

def fill(version):
    def write(directory):
        (directory / "sub").mkdir()
        for name in ("a", "sub/b"):
            (directory / name).write_text(version * 1000)
    return write

def operation(target):
    if KIND == "file":
        files.write_file(target, b"new" * 1000)
    else:
        files.write_directory(target, fill("new"), replace=(lambda old, shown: None) if EXISTS else None)

def prepare(target):
    if EXISTS and KIND == "file":
        target.write_text("old" * 1000)
    elif EXISTS:
        target.mkdir()
        fill("old")(target)

def content(target):
    if not target.exists():
        return None
    paths = [target] if target.is_file() else sorted(path for path in target.rglob("*") if path.is_file())
    return sorted({path.read_text().replace("old" * 1000, "old").replace("new" * 1000, "new") for path in paths}) + [
        len(paths)
    ]

def die_at(line_number):
    count = 0
    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename not in (files.__file__, shutil.__file__, "<string>"):
            return None
        if event == "line":
            count += 1
            if count == line_number:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    return trace

KIND, EXISTS = sys.argv[1], sys.argv[2] == "exists"
outcomes, line_number, killed = [], 0, True
while killed:
    line_number += 1
    with tempfile.TemporaryDirectory(dir=sys.argv[3]) as root:
        target = Path(root) / "target"
        prepare(target)
        child = os.fork()
        if child == 0:
            sys.settrace(die_at(line_number))
            operation(target)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        outcomes.append([content(target), [entry.name for entry in files.visible_entries(Path(root))]])
print(json.dumps(outcomes))
"""


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_kill_at_any_line_leaves_the_old_or_the_new_and_nothing_listed_beside(
    tmp_path: Path, kind: str, exists: bool
) -> None:
    command = [sys.executable, "-c", KILL_AT_EVERY_LINE, kind, "exists" if exists else "missing", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    num_files = 1 if kind == "file" else 2
    old, new = (["old", num_files] if exists else None), ["new", num_files]
    contents = [content for content, _ in outcomes]
    assert all(content in (old, new) for content in contents), contents
    switch = contents.index(new)
    assert contents == [old] * switch + [new] * (len(contents) - switch)
    assert 5 < switch < len(contents) - 1  # it was killed on either side of the rename
    for content, listed in outcomes:
        assert listed == ([] if content is None else ["target"])


def one_file(name: str, content: str) -> Callable[[Path], None]:
    def fill(directory: Path) -> None:
        (directory / name).write_text(content)

    return fill


class SyncLog:
    """Remembers in which order paths were synced and renamed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, Any]] = []
        fsync, exchange = os.fsync, files._exchange

        def logged_fsync(descriptor: int) -> None:
            self.events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
            fsync(descriptor)

        def logged_exchange(first: Path, second: Path) -> None:
            self.events.append(("move", second))
            exchange(first, second)

        monkeypatch.setattr(os, "fsync", logged_fsync)
        monkeypatch.setattr(files, "_exchange", logged_exchange)
        for name in ("rename", "replace"):
            self._log_move(monkeypatch, name, getattr(os, name))

    def _log_move(self, monkeypatch: pytest.MonkeyPatch, name: str, move: Any) -> None:
        def logged(source: Any, target: Any) -> None:
            self.events.append(("move", Path(target)))
            move(source, target)

        monkeypatch.setattr(os, name, logged)

    def synced(self, *, before: bool) -> list[Path]:
        (move,) = [index for index, (kind, _) in enumerate(self.events) if kind == "move"]
        part = self.events[:move] if before else self.events[move + 1 :]
        return [path for _, path in part]


@pytest.mark.parametrize("replace", [False, True])
def test_a_directory_is_synced_whole_before_the_move_and_its_parent_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    target = tmp_path / "target"
    if replace:
        write_directory(target, lambda directory: None)

    def fill(directory: Path) -> None:
        (directory / "sub").mkdir()
        (directory / "a").write_text("a")
        (directory / "sub" / "b").write_text("b")

    log = SyncLog(monkeypatch)
    write_directory(target, fill, replace=anything if replace else None)
    before = log.synced(before=True)
    (temporary,) = {path for path in before if path.parent == tmp_path}
    assert {path.relative_to(temporary).as_posix() for path in before} == {".", "a", "sub", "sub/b"}
    assert log.synced(before=False) == [tmp_path]


def test_a_file_is_synced_before_the_rename_and_its_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SyncLog(monkeypatch)
    write_file(tmp_path / "a", b"x")
    assert [path.name.startswith(TEMPORARY_PREFIX) for path in log.synced(before=True)] == [True]
    assert log.synced(before=False) == [tmp_path]


def test_write_json_is_readable_text(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"ü": [1, None]})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "ü": [\n    1,\n    null\n  ]\n}\n'
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o644


def test_a_value_that_json_does_not_know_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", object())
    assert (tmp_path / "a.json").read_text() == "1\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_failing_rename_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path / "a", b"x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_failing_fill_leaves_what_was_there(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "a").write_text("half")
        raise OSError(28, "No space left on device")

    write_directory(tmp_path / "target", one_file("a", "old"))
    for replace, target in ((anything, "target"), (None, "other")):
        with pytest.raises(OSError, match="No space"):
            write_directory(tmp_path / target, fail, replace=replace)
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]
    assert (tmp_path / "target" / "a").read_text() == "old"


def test_replacing_exchanges_the_directory_whole(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_directory(target, one_file("old", "old"))
    before = os.open(target, os.O_RDONLY)
    write_directory(target, one_file("new", "new"), replace=anything)
    assert [entry.name for entry in target.iterdir()] == ["new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    assert os.listdir(before) == []  # who had it open sees the old one, now removed; never a mixture
    os.close(before)


OURS = only_files(re.compile(r"a|b"), ["a"], "`test`")


@pytest.mark.parametrize("names", [(), ("a",), ("a", "b")])
def test_a_directory_of_known_files_may_be_replaced(tmp_path: Path, names: tuple[str, ...]) -> None:
    (tmp_path / "target").mkdir()
    for name in names:
        (tmp_path / "target" / name).write_text("old")
    write_directory(tmp_path / "target", one_file("a", "new"), replace=OURS)
    assert [entry.name for entry in (tmp_path / "target").iterdir()] == ["a"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("foreign", ["diary.txt", ".hidden", "sub/", "b/", "link", "a~", "pipe"])
def test_a_directory_with_anything_else_in_it_is_left_as_it_is(tmp_path: Path, foreign: str) -> None:
    target = tmp_path / "target"
    write_directory(target, one_file("a", "old"))
    if foreign.endswith("/"):
        (target / foreign / "deeper").mkdir(parents=True)
    elif foreign == "link":
        (target / "b").symlink_to(target / "a")
    elif foreign == "pipe":
        os.mkfifo(target / "b")
    else:
        (target / foreign).write_text("precious")
    before = sorted(target.rglob("*"))
    with pytest.raises(ConflictError, match=r"not replaced: it holds .*, which `test` does not write"):
        write_directory(target, one_file("a", "new"), replace=OURS)
    assert sorted(target.rglob("*")) == before
    assert (target / "a").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]


def test_a_directory_without_its_mark_is_left_as_it_is(tmp_path: Path) -> None:
    write_directory(tmp_path / "target", one_file("b", "old"))
    with pytest.raises(ConflictError, match="it has no a, so `test` did not write it"):
        write_directory(tmp_path / "target", one_file("a", "new"), replace=OURS)
    assert (tmp_path / "target" / "b").read_text() == "old"


def test_a_file_that_somebody_puts_there_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_directory(target, one_file("a", "old"))

    def overtaken(directory: Path) -> None:
        (directory / "a").write_text("new")
        (target / "diary.txt").write_text("precious")

    with pytest.raises(ConflictError, match=r"diary\.txt"):
        write_directory(target, overtaken, replace=OURS)
    assert (target / "diary.txt").read_text() == "precious"
    assert (target / "a").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]


def test_an_existing_directory_is_not_replaced_unasked(tmp_path: Path) -> None:
    write_directory(tmp_path / "target", lambda directory: None)
    with pytest.raises(ConflictError, match="exists already"):
        write_directory(tmp_path / "target", lambda directory: None)


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_or_link_is_never_replaced_by_a_directory(tmp_path: Path, replace: bool) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    for name in ("file", "link", "dangling"):
        with pytest.raises(ConflictError):
            write_directory(tmp_path / name, lambda directory: None, replace=anything if replace else None)
    assert (tmp_path / "file").read_text() == "precious"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dangling", "elsewhere", "file", "link"]


def test_of_two_writers_of_one_new_name_the_second_is_refused(tmp_path: Path) -> None:
    def overtaken(directory: Path) -> None:
        write_directory(tmp_path / "target", one_file("first", "1"))

    with pytest.raises(ConflictError, match="meanwhile"):
        write_directory(tmp_path / "target", overtaken)
    assert [entry.name for entry in (tmp_path / "target").iterdir()] == ["first"]


def test_missing_parents_are_created(tmp_path: Path) -> None:
    write_directory(tmp_path / "a" / "b" / "target", lambda directory: None)
    assert (tmp_path / "a" / "b" / "target").is_dir()


def test_a_new_file_appears_whole_or_not_at_all_and_replaces_nothing(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a"
    seen: list[list[str]] = []

    def fill(temporary: Path) -> None:
        temporary.write_text("whole")
        seen.append([path.name for path in visible_entries(target.parent)])

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_new_file(target, fail)
    assert os.listdir(target.parent) == []
    write_new_file(target, fill)
    assert seen == [[]] and target.read_text() == "whole"
    with pytest.raises(ConflictError, match="exists already"):
        write_new_file(target, fill)

    def late(temporary: Path) -> None:
        temporary.write_text("late")
        (tmp_path / "b").write_text("first")

    with pytest.raises(ConflictError, match="somebody else meanwhile"):
        write_new_file(tmp_path / "b", late)
    assert (tmp_path / "b").read_text() == "first"
    assert sorted(os.listdir(tmp_path)) == ["b", "deep"]


def test_temporary_entries_are_not_listed(tmp_path: Path) -> None:
    for name in ("b", "a", f"{TEMPORARY_PREFIX}x"):
        (tmp_path / name).mkdir()
    assert [entry.name for entry in visible_entries(tmp_path)] == ["a", "b"]
    assert visible_entries(tmp_path / "missing") == []


def test_a_lock_excludes_and_names_its_holder(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path / "lock", "the cache"):
        in_use = pytest.raises(ConflictError, match=f"the cache is in use by process {os.getpid()}")
        with in_use, exclusive_lock(tmp_path / "lock", "the cache"):
            pass
    with exclusive_lock(tmp_path / "lock", "the cache"):
        pass


def test_a_killed_processes_lock_is_free(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from kt_runtime.files import exclusive_lock\n"
        "with exclusive_lock(Path(sys.argv[1]), 'x'): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        in_use = pytest.raises(ConflictError, match=f"process {process.pid}")
        with in_use, exclusive_lock(tmp_path / "lock", "x"):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with exclusive_lock(tmp_path / "lock", "x"):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_fork_that_outlives_the_holder_does_not_hold_its_lock(tmp_path: Path) -> None:
    """A server's scheduler ends after its frontend; the next server may start at once."""
    may_end = multiprocessing.get_context("fork").Event()
    with exclusive_lock(tmp_path / "lock", "x"):
        fork = multiprocessing.get_context("fork").Process(target=may_end.wait, args=(60,))
        fork.start()
        in_use = pytest.raises(ConflictError, match=f"process {os.getpid()}")
        with in_use, exclusive_lock(tmp_path / "lock", "x"):
            pass
    try:
        deadline = time.monotonic() + 60
        while lock_holder(tmp_path / "lock") is not None:  # until the fork has begun
            assert time.monotonic() < deadline
        assert fork.is_alive()
    finally:
        may_end.set()
        fork.join(60)
    assert fork.exitcode == 0


def test_who_holds_a_lock_can_be_asked_without_taking_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert lock_holder(path) is None and not path.exists()
    with exclusive_lock(path, "x"):
        assert lock_holder(path) == str(os.getpid())
    assert lock_holder(path) is None
    with exclusive_lock(path, "x"):
        pass


def test_a_lock_is_held_on_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", refuse)
    in_use = pytest.raises(ConflictError, match="in use by process unknown")
    with exclusive_lock(tmp_path / "lock", "x"), in_use, exclusive_lock(tmp_path / "lock", "x"):
        pass


@pytest.mark.parametrize("exists", [False, True])
def test_a_directory_is_moved_over_another_and_nothing_is_left(tmp_path: Path, exists: bool) -> None:
    source, target = tmp_path / f"{TEMPORARY_PREFIX}new", tmp_path / "target"
    for directory, text in ((source, "new"), (target, "old"))[: 1 + exists]:
        directory.mkdir()
        (directory / text).write_text(text)
    move_directory(source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["target"] and [path.name for path in target.iterdir()] == [
        "new"
    ]


def test_a_directory_is_moved_over_a_link_whose_target_stays(tmp_path: Path) -> None:
    for name in ("target", f"{TEMPORARY_PREFIX}new"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    move_directory(tmp_path / f"{TEMPORARY_PREFIX}new", tmp_path / "link")
    assert not (tmp_path / "link").is_symlink() and {path.name for path in tmp_path.iterdir()} == {"target", "link"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_has_no_nan_and_the_old_file_stays(tmp_path: Path, value: float) -> None:
    write_json(tmp_path / "a.json", {"loss": 1.0})
    with pytest.raises(NumericsError, match=r"a\.json: not written"):
        write_json(tmp_path / "a.json", {"loss": [value]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": 1.0}
