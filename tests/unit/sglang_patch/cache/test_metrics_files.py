from __future__ import annotations

import os
from pathlib import Path

from kt_runtime.sglang_patch.cache.metrics_files import MetricsFiles

SIZE = 1 << 16


def make_hole(path: Path, size: int = SIZE) -> Path:
    path.touch()
    os.truncate(path, size)
    return path


def has_holes(path: Path) -> bool:
    status = path.stat()
    return status.st_blocks * 512 < status.st_size


def test_files_have_no_holes_afterwards_and_keep_what_is_in_them(tmp_path: Path) -> None:
    first, other = make_hole(tmp_path / "counter_1.db"), make_hole(tmp_path / "other.txt")
    with first.open("r+b") as file:
        file.write(b"metric")
    files = MetricsFiles(tmp_path)
    files.take_room()
    assert not has_holes(first) and has_holes(other)
    assert first.read_bytes() == b"metric" + bytes(SIZE - 6)
    os.truncate(first, 2 * SIZE)  # it grows as it is doubled
    second = make_hole(tmp_path / "gauge_2.db")
    files.take_room()
    assert not has_holes(first) and not has_holes(second)


def test_without_a_directory_nothing_happens(tmp_path: Path) -> None:
    MetricsFiles(None).take_room()
    MetricsFiles(tmp_path / "gone").take_room()
