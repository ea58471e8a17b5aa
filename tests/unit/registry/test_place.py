from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.registry import open_place
from kt_runtime.registry.place import DirectoryPlace


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a directory or a URL"),
        ("a\0b", "must be a directory or a URL"),
        ("file://elsewhere/registry", "must have a full path"),
        ("file://relative", "must have a full path"),
    ],
)
def test_what_is_no_place_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        open_place(text, "one")


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="unknown scheme 'S3'; known: file, memory, s3"):
        open_place("S3://bucket/x", "one")


def test_a_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(InvalidValueError, match=r"pip install kt-runtime\[s3\]"):
        open_place("s3://bucket/registry", "one")


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    place = open_place((tmp_path / "with space").as_uri(), "one")
    assert isinstance(place, DirectoryPlace) and place.root == tmp_path / "with space"


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is whole and synced, a file has another name."""
    place = DirectoryPlace(tmp_path, "one")
    seen = []
    sync = os.fsync

    def synced(descriptor: int) -> None:
        seen.append((stat.S_ISREG(os.fstat(descriptor).st_mode), place.keys("names")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    assert place.create("names/bob/00000001.json", b"x" * 100)
    there = ["names/bob/00000001.json"]
    assert seen == [(True, []), (False, there), (False, there), (False, there)]  # the file, then bob, names, the root


def test_only_directories_with_a_new_name_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication waits for each of them."""
    place = DirectoryPlace(tmp_path, "one")
    synced: list[str] = []

    def note(directory: Path) -> None:
        synced.append(str(directory.relative_to(tmp_path)))

    monkeypatch.setattr("kt_runtime.registry.place.fsync_directory", note)

    def created(key: str) -> list[str]:
        synced.clear()
        assert place.create(key, b"x")
        return list(synced)

    assert created("names/bob/1.json") == ["names/bob", "names", "."]
    assert created("names/bob/2.json") == ["names/bob"]
    assert created("names/alice/1.json") == ["names/alice", "names"]
    assert created("data/one/a/file") == ["data/one/a", "data/one", "data", "."]
    place.remove("data/one/a")
    assert created("data/one/a/file") == ["data/one/a", "data/one"]
    DirectoryPlace(tmp_path, "two").remove("names/alice")  # and this process makes it again
    assert created("names/alice/1.json") == ["names/alice", "names"]


def test_a_key_is_created_once(tmp_path: Path) -> None:
    one, two = DirectoryPlace(tmp_path, "one"), DirectoryPlace(tmp_path, "two")
    assert one.create("a/b", b"first") and not two.create("a/b", b"second")
    assert one.read("a/b", 100) == b"first" and not one.keys("unfinished")


def test_a_file_beyond_its_bound_is_an_error(tmp_path: Path) -> None:
    place = DirectoryPlace(tmp_path, "one")
    place.put("a", b"12345")
    with pytest.raises(OSError, match="more than 4 bytes"):
        place.read("a", 4)
