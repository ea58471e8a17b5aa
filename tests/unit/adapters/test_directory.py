from __future__ import annotations

import os
from pathlib import Path

import pytest

from kt_runtime.adapters import open_directory
from kt_runtime.errors import AdapterError, NotFoundError


def test_files_are_listed_and_read_whole(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"12345")
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "checkpoint-1").mkdir()
    with open_directory(tmp_path) as directory:
        assert directory.file_names() == ["a", "b"]
        assert directory.read("b", 5) == b"12345"
        assert directory.read("a", 5) == b""


def test_a_missing_directory_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no such directory"), open_directory(tmp_path / "x"):
        pass


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_an_impossible_path_is_refused(path: str) -> None:
    with pytest.raises(AdapterError, match="can't be opened"), open_directory(path):
        pass


def test_a_linked_directory_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    with pytest.raises(AdapterError, match="is a symbolic link"), open_directory(tmp_path / "link"):
        pass
    with pytest.raises(AdapterError, match="Not a directory"), open_directory(tmp_path / "file"):
        pass


def test_links_pipes_directories_and_large_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123456")
    (tmp_path / "directory").mkdir()
    with open_directory(tmp_path) as directory:
        with pytest.raises(AdapterError, match="file: has 6 bytes; at most 5"):
            directory.read("file", 5)
        with pytest.raises(AdapterError, match="is a directory; expected a regular file"):
            directory.read("directory", 5)
        with pytest.raises(AdapterError, match="missing: can't be opened: No such file"):
            directory.read("missing", 5)
        (tmp_path / "link").symlink_to(tmp_path / "file")
        with pytest.raises(AdapterError, match="link: can't be opened"):
            directory.read("link", 9)
        with pytest.raises(AdapterError, match="'link' is a symbolic link"):
            directory.file_names()
        (tmp_path / "link").unlink()
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(AdapterError, match="pipe: is a pipe"):
            directory.read("pipe", 9)
        with pytest.raises(AdapterError, match="'pipe' is not a regular file"):
            directory.file_names()


def test_replacing_the_directory_after_opening_it_changes_nothing(tmp_path: Path) -> None:
    good, evil = tmp_path / "adapter", tmp_path / "evil"
    for path, content in ((good, b"good"), (evil, b"evil")):
        path.mkdir()
        (path / "file").write_bytes(content)
    with open_directory(good) as directory:
        directory.file_names()
        good.rename(tmp_path / "moved")
        evil.rename(good)
        assert directory.read("file", 9) == b"good"
