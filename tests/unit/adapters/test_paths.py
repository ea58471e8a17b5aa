"""Names, paths and directories from outside: what is accepted, and what is refused."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kt_runtime.adapters import check_adapter_name, confined, open_directory, paths
from kt_runtime.bench.cache import system_cache
from kt_runtime.beside import PIECE_BYTES
from kt_runtime.direct_file import BLOCK_BYTES, DirectFile
from kt_runtime.errors import AdapterError, InvalidValueError, NotFoundError


@pytest.mark.parametrize("name", ["a", "sailor-2.1_final", "A" * 128, "0"])
def test_ordinary_names_are_accepted(name: str) -> None:
    assert check_adapter_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".hidden", "-x", "a/b", "a:b", "a b", "a\n", "a\0", "A" * 129, "аdapter", "../x", "%2e%2e/x", "a\\b"]
)
def test_names_that_files_urls_or_requests_could_misread_are_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match=r"adapter name .*expected 1 to 128"):
        check_adapter_name(name)


@pytest.mark.parametrize("path", ["a", "a/b", "./a", "a/../b", "%2e%2e/a"])
def test_paths_below_the_root_are_accepted(tmp_path: Path, path: str) -> None:
    assert tmp_path in confined(path, tmp_path).parents
    assert confined(tmp_path / "x", tmp_path) == tmp_path / "x"


@pytest.mark.parametrize("path", ["", ".", "..", "../x", "a/../../x", "/etc", "/", "a\0b", "a/" * 3000])
def test_paths_outside_of_the_root_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidValueError, match="path "):
        confined(path, tmp_path)


def test_a_link_that_leads_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "root-of-somebody-else"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    with pytest.raises(InvalidValueError, match="is not below"):
        confined("link/adapter", root)
    with pytest.raises(InvalidValueError, match="is not below"):
        confined(outside, root)


def test_names_and_paths_are_checked_without_torch() -> None:
    code = (
        "import sys; from kt_runtime.adapters import check_adapter_name, confined;"
        "check_adapter_name('a'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


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


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_for_a_large_file_is_not_written_before_the_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing zeros to it would hold the GIL, and every stream of a server would wait."""
    size_bytes = 256 << 20
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", size_bytes)
    at_reading: list[int] = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        at_reading.append(resident_bytes())
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", preadv)
    with open_directory(tmp_path) as directory, pytest.raises(OSError, match=os.strerror(errno.EIO)):
        before = resident_bytes()
        directory.read("file", size_bytes)
    assert at_reading[0] - before < size_bytes // 8


@pytest.mark.parametrize("left", [0, 1, BLOCK_BYTES - 1])
def test_a_large_file_is_read_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """In whole blocks and what is left of them; where the file system can't, as any file."""
    (tmp_path / "file").write_bytes(data := os.urandom(PIECE_BYTES + BLOCK_BYTES + left))
    system_cache.drop(tmp_path / "file")
    read = []

    def read_into(self: DirectFile, views: Sequence[memoryview], offset: int) -> int:
        read.append(original(self, views, offset))
        return read[-1]

    original = DirectFile.read_into
    monkeypatch.setattr(DirectFile, "read_into", read_into)
    with open_directory(tmp_path) as directory:
        assert directory.read("file", len(data)) == data
        assert read == []
        system_cache.drop(tmp_path / "file")
        monkeypatch.setattr(paths, "DIRECT_BYTES", len(data))
        assert directory.read("file", len(data)) == data
    assert sum(read) in (0, len(data)) and (sum(read) == 0 or system_cache.cached_share(tmp_path / "file") == 0.0)


def test_a_large_file_that_others_have_read_stays_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(data := os.urandom(PIECE_BYTES))
    monkeypatch.setattr(paths, "DIRECT_BYTES", 1)
    with open_directory(tmp_path) as directory:
        assert directory.read("file", len(data)) == data
    assert system_cache.cached_share(tmp_path / "file") in (1.0, None)


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("begin", [0, 13, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_a_file_is_spread_over_arrays_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: int, is_direct: bool
) -> None:
    """Some end within a piece, one is larger than a piece, one is empty. Also if the system reads less at once."""
    sizes = [5, 0, PIECE_BYTES + 7, 1, 2 * BLOCK_BYTES, 3000]
    (tmp_path / "file").write_bytes(data := os.urandom(begin + sum(sizes)))
    if is_direct:
        system_cache.drop(tmp_path / "file")
        monkeypatch.setattr(paths, "DIRECT_BYTES", 1)
    else:
        read_at_once = os.preadv
        monkeypatch.setattr(os, "preadv", lambda file, views, at: read_at_once(file, [views[0][:4099]], at))
    targets = [np.zeros(size, np.uint8) for size in sizes]
    with open_directory(tmp_path) as directory, directory.open("file", len(data)) as file:
        assert file.beginning(begin) == data[:begin]
        file.spread(begin, len(data), iter(targets))
        file.check_end()
    assert b"".join(map(bytes, targets)) == data[begin:]


def test_no_more_is_read_than_the_last_block_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(os.urandom(3 * PIECE_BYTES))
    asked, read_at_once = [], os.preadv

    def preadv(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        asked.append((offset, offset + len(views[0])))
        return read_at_once(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with open_directory(tmp_path) as directory, directory.open("file", 3 * PIECE_BYTES) as file:
        file.spread(5, PIECE_BYTES + 1, [np.zeros(PIECE_BYTES - 4, np.uint8)])
    assert asked == [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES + BLOCK_BYTES)]


@pytest.mark.parametrize("more", [1, -1, PIECE_BYTES])
def test_a_file_that_changes_its_length_while_it_is_spread_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    size = PIECE_BYTES + 5
    (tmp_path / "file").write_bytes(os.urandom(size))
    monkeypatch.setattr(paths, "pause", lambda: os.truncate(tmp_path / "file", size + more))
    how = "longer" if more > 0 else "shorter"
    with open_directory(tmp_path) as directory, directory.open("file", size) as file:
        with pytest.raises(AdapterError, match=f"became {how} while it was read"):
            file.spread(8, size, [np.zeros(100, np.uint8), np.zeros(size - 108, np.uint8)])
            file.check_end()
        os.truncate(tmp_path / "file", 3)
        with pytest.raises(AdapterError, match=rf"became shorter while it was read \(3 of {size} bytes\)"):
            file.beginning(8)


@pytest.mark.parametrize("more", [1, -1])
def test_a_large_file_that_changes_its_length_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    size = PIECE_BYTES + 5
    (tmp_path / "file").write_bytes(os.urandom(size))
    system_cache.drop(tmp_path / "file")
    monkeypatch.setattr(paths, "DIRECT_BYTES", 1)
    monkeypatch.setattr(paths, "pause", lambda: os.truncate(tmp_path / "file", size + more))
    with open_directory(tmp_path) as directory, pytest.raises(AdapterError, match="longer" if more > 0 else "shorter"):
        directory.read("file", size)


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
