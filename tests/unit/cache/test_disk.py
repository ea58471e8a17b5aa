"""The disk's calls: reads past the system's cache bring what usual ones bring, wherever the file lies and ends."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from kt_runtime import direct_file
from kt_runtime.bench.cache import system_cache
from kt_runtime.cache.disk import DiskFiles
from kt_runtime.direct_file import BLOCK_BYTES, DirectFile, cached_share

SIZE = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    system_cache.drop(path)
    return path


def blocks(size: int = SIZE) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


def is_direct_there(path: Path) -> bool:
    """Whether this system and file system can do it: elsewhere the same bytes come as usual."""
    with path.open("rb") as file:
        direct = DirectFile(file.fileno())
        try:
            return direct.read_into([blocks()], 0) > 0
        finally:
            direct.close()


def test_nothing_of_the_file_is_left_in_the_system_s_cache(path: Path) -> None:
    file, memory = DiskFiles().open(path), blocks()
    assert file.read_into([memory[: SIZE // 4], memory[SIZE // 4 :]], 0) == SIZE
    file.close()
    if is_direct_there(path):
        assert system_cache.cached_share(path) == 0.0
    assert memory == path.read_bytes()


def test_what_is_in_the_system_s_cache_comes_from_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = path.read_bytes()
    monkeypatch.setattr(direct_file.os, "preadv", None)  # must not be called
    with path.open("rb") as file:
        assert cached_share(file.fileno(), 0, SIZE) in (1.0, None)
        direct = DirectFile(file.fileno())
        assert direct.read_into([blocks()], 0) == 0
        direct.close()
    monkeypatch.undo()
    opened, memory = DiskFiles().open(path), blocks()
    assert opened.read_into([memory], 0) == SIZE
    opened.close()
    assert memory == contents


@pytest.mark.parametrize("cut", [1, 511, BLOCK_BYTES, BLOCK_BYTES + 1, SIZE // 2, SIZE])
def test_a_file_that_ends_before_gives_what_it_has(path: Path, cut: int) -> None:
    os.truncate(path, SIZE - cut)
    system_cache.drop(path)
    file, memory = DiskFiles().open(path), blocks()
    assert file.read_into([memory], 0) == SIZE - cut
    file.close()
    assert memory[: SIZE - cut] == path.read_bytes()


def test_memory_and_places_that_are_no_blocks_are_read_as_usual(path: Path) -> None:
    for offset, start, size in ((0, 100, SIZE // 2), (100, 0, SIZE // 2), (0, 0, SIZE // 2 + 1)):
        system_cache.drop(path)
        file, memory = DiskFiles().open(path), blocks()
        part = memory[start : start + size]
        assert file.read_into([part], offset) == size
        file.close()
        assert part == path.read_bytes()[offset : offset + size]


def test_a_file_system_without_it_is_read_as_usual(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)

    opened, memory = DiskFiles().open(path), blocks()
    monkeypatch.setattr(direct_file.os, "open", refuse)
    assert opened.read_into([memory], 0) == SIZE
    monkeypatch.undo()
    opened.close()
    assert memory == path.read_bytes()


def test_an_error_of_the_disk_is_none_of_the_method(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    opened = DiskFiles().open(path)
    monkeypatch.setattr(direct_file.os, "preadv", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        opened.read_into([blocks()], 0)
    monkeypatch.undo()
    opened.close()
