"""The disk tier's directory before the server starts. A disk that fails later: tests/unit/cache."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference.cache.files import page_to_write

from kt_runtime.cache import inspection
from kt_runtime.cache.directory import part_of_rank
from kt_runtime.cache.format import Namespace
from kt_runtime.cache.page_store import PageStore
from kt_runtime.errors import ConflictError, InvalidValueError, NotFoundError
from kt_runtime.files import exclusive_lock
from kt_runtime.serve import cache_directory as module
from kt_runtime.serve.cache_directory import cache_directory, check_directory, claimed

MIB = 1 << 20
NAMESPACE = Namespace(weights="w", kv_dtype="bfloat16", page_tokens=64, layout="page_first").digest()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A directory that a server has used and left."""
    PageStore(tmp_path / "cache", 4 * MIB, NAMESPACE).close()
    return tmp_path / "cache"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Errors that the next locks meet."""
    numbers: list[int] = []

    def lock(path: Path, purpose: str) -> Any:
        if numbers:
            raise OSError(numbers[0], os.strerror(numbers[0]))
        return exclusive_lock(path, purpose)

    monkeypatch.setattr(module, "exclusive_lock", lock)
    yield numbers


def test_a_user_without_a_home_directory_is_asked_for_a_full_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it answers where nothing is known
    for asked in (None, Path("~/cache")):
        with pytest.raises(InvalidValueError, match="name a directory by its full path"):
            cache_directory(asked, Path("/models/m"))


def test_the_default_directory_belongs_to_one_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directories = {cache_directory(None, Path(path)) for path in ("/models/a", "/models/b", "/other/a")}
    assert len(directories) == 3 and all(path.parent == tmp_path / "kt-runtime" / "prefix" for path in directories)
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_directory(None, Path("/models/a")).is_relative_to("/home/somebody/.cache")
    assert cache_directory(Path("~/c"), Path("/models/a")) == Path("/home/somebody/c")


def test_a_new_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    assert check_directory(directory, MIB, read_only=False) == []
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    PageStore(directory, 4 * MIB, NAMESPACE).close()
    assert check_directory(directory, MIB, read_only=False) == []


def test_a_directory_that_a_server_writes_to_is_refused_with_its_process(cache: Path) -> None:
    store = PageStore(cache, 4 * MIB, NAMESPACE)
    with pytest.raises(ConflictError, match=rf"--cache-dir {cache}/lock: .*in use by process {os.getpid()}.*read-only"):
        check_directory(cache, MIB, read_only=False)
    assert check_directory(cache, MIB, read_only=True) == []
    store.close()
    assert check_directory(cache, MIB, read_only=False) == []


def test_a_directory_is_one_servers_from_before_its_model_is_loaded(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cache)
    with claimed(cache, tmp_path):
        for name in (cache, tmp_path / "link"):
            with (
                pytest.raises(ConflictError, match=f"--cache-dir {name} is in use by process"),
                claimed(name, tmp_path),
            ):
                pass
        PageStore(cache, 4 * MIB, NAMESPACE).close()
    with claimed(cache, tmp_path):
        pass


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValueError, match=r"--cache-dir .*file: is no directory"):
        check_directory(tmp_path / "file", MIB, read_only=False)
    with pytest.raises(InvalidValueError, match=r"--cache-dir .*file/sub: can't be used \(Not a directory\)"):
        check_directory(tmp_path / "file" / "sub", MIB, read_only=False)


def test_a_directory_with_other_things_in_it_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    for name in ("thesis.tex", "photos", ".profile"):
        (tmp_path / name).mkdir()
    with pytest.raises(InvalidValueError, match=r"holds other things \(photos, thesis.tex\); name an empty directory"):
        check_directory(tmp_path, MIB, read_only=False)
    assert len(list(tmp_path.iterdir())) == 3


def test_the_root_of_a_disk_of_its_own_is_fine(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert check_directory(tmp_path, MIB, read_only=False) == []


@pytest.mark.parametrize("read_only", [False, True])
def test_a_directory_that_every_user_may_write_to_is_refused(cache: Path, read_only: bool) -> None:
    cache.chmod(0o777)
    with pytest.raises(InvalidValueError, match=r"every user may write there \(mode 0777\)"):
        check_directory(cache, MIB, read_only=read_only)


def test_reading_only_needs_a_cache_and_writes_nothing(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no prefix cache to read"):
        check_directory(tmp_path / "none", MIB, read_only=True)
    assert not (tmp_path / "none").exists()
    before = sorted((path, path.stat().st_mtime_ns) for path in cache.rglob("*"))
    assert check_directory(cache, MIB, read_only=True) == []
    assert sorted((path, path.stat().st_mtime_ns) for path in cache.rglob("*")) == before


def test_a_read_only_file_system_is_refused_with_the_way_out(cache: Path, failing: list[int]) -> None:
    failing[:] = [errno.EROFS]
    with pytest.raises(
        InvalidValueError, match=r"is on a read-only file system; .*--cache-read-only to use what is in"
    ):
        check_directory(cache, MIB, read_only=False)


def test_a_user_who_may_not_write_is_told_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidValueError, match=f"--cache-dir {cache}: this user may not write there"):
        check_directory(cache, MIB, read_only=False)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_from_the_beginning_is_said_and_does_not_stop_serving(
    cache: Path, failing: list[int], number: int
) -> None:
    failing[:] = [number]
    (note,) = check_directory(cache, MIB, read_only=False)
    assert f"the disk of {cache} is full" in note


def test_less_room_than_the_quota_is_said_with_the_bytes(cache: Path) -> None:
    (cache / "segments" / "00000001.seg").write_bytes(bytes(3 * MIB))
    (note,) = check_directory(cache, 1 << 60, read_only=False)
    assert "--cache-disk 1.05e+06 TiB" in note and "free and 3 MiB in the cache" in note


def test_the_names_that_count_as_the_caches_own_are_those_of_the_store(cache: Path) -> None:
    store = PageStore(cache, 4 * MIB, NAMESPACE)
    store.probe(1)
    store.close()
    assert set(os.listdir(cache)) <= module.OWN_NAMES
    assert {"lock", "index.log", "segments"} <= set(os.listdir(cache))


# Several ranks


def page_of(path: Path) -> None:
    store = PageStore(path, 4 * MIB, NAMESPACE)
    store.write([page_to_write(1)])
    store.close()


def test_each_rank_of_this_host_gets_a_part_that_no_other_server_writes_to(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    assert check_directory(directory, MIB, read_only=False, ranks=(2, 3), num_ranks=4) == []
    assert sorted(os.listdir(directory)) == ["rank-2-of-4", "rank-3-of-4"]
    assert stat.S_IMODE((directory / "rank-3-of-4").stat().st_mode) == 0o700
    store = PageStore(directory / "rank-3-of-4", 4 * MIB, NAMESPACE)
    with pytest.raises(ConflictError, match=rf"rank-3-of-4/lock: .*in use by process {os.getpid()}.*read-only"):
        check_directory(directory, MIB, read_only=False, ranks=(2, 3), num_ranks=4)
    assert check_directory(directory, MIB, read_only=False, ranks=(0, 1), num_ranks=4) == []  # another host
    store.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_pages_of_another_number_of_ranks_are_refused_and_stay(tmp_path: Path, read_only: bool) -> None:
    for number, held in ((1, "one rank"), (2, "2 ranks")):
        directory = tmp_path / str(number)
        page_of(part_of_rank(directory, 0, number))
        before = sorted(directory.rglob("*"))
        for asked, has in ((1, "one rank"), (2, "2 ranks"), (4, "4 ranks")):
            if asked == number:
                continue
            with pytest.raises(InvalidValueError, match=f"holds pages of {held}, and this server has {has} .--tp-size"):
                check_directory(directory, MIB, read_only=read_only, ranks=range(asked), num_ranks=asked)
            assert sorted(directory.rglob("*")) == before


def test_a_directory_that_was_emptied_is_any_number_s(tmp_path: Path) -> None:
    page_of(tmp_path / "rank-0-of-2")
    assert inspection.clear(tmp_path) == 1
    assert check_directory(tmp_path, MIB, read_only=False) == []


def test_reading_only_needs_the_part_of_each_rank(tmp_path: Path) -> None:
    page_of(tmp_path / "rank-0-of-2")
    assert check_directory(tmp_path, MIB, read_only=True, ranks=(0,), num_ranks=2) == []
    with pytest.raises(NotFoundError, match=r"rank-1-of-2: there is no prefix cache to read"):
        check_directory(tmp_path, MIB, read_only=True, ranks=(0, 1), num_ranks=2)


def test_the_default_directory_belongs_to_one_number_of_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = [cache_directory(None, Path("/models/a"), ranks).name for ranks in (1, 2, 4)]
    assert names[1:] == [f"{names[0]}-2-ranks", f"{names[0]}-4-ranks"]
    assert cache_directory(Path("/c"), Path("/models/a"), 2) == Path("/c")
