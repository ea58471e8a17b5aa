from __future__ import annotations

from pathlib import Path

import pytest

from kt_runtime.serve.models.hub_cache import find_snapshot, hub_cache_directory, is_hub_id, repository_directory

COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path / "models--org--name"


def test_the_variables_are_read_in_hugging_faces_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/one")
    monkeypatch.setenv("HF_HOME", "/two")
    monkeypatch.setenv("XDG_CACHE_HOME", "/three")
    assert hub_cache_directory() == Path("/one")
    monkeypatch.delenv("HF_HUB_CACHE")
    assert hub_cache_directory() == Path("/two/hub")
    monkeypatch.delenv("HF_HOME")
    assert hub_cache_directory() == Path("/three/huggingface/hub")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub_cache_directory() == Path.home() / ".cache/huggingface/hub"


def test_the_snapshot_of_main_is_found(repository: Path) -> None:
    for commit in (COMMIT, OTHER):
        (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(OTHER + "\n")
    assert repository_directory("org/name") == repository
    assert find_snapshot("org/name") == repository / "snapshots" / OTHER


def test_without_a_reference_only_a_single_snapshot_is_taken(repository: Path) -> None:
    assert find_snapshot("org/name") is None
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    assert find_snapshot("org/name") == repository / "snapshots" / COMMIT
    (repository / "snapshots" / OTHER).mkdir()
    assert find_snapshot("org/name") is None


def test_a_reference_that_is_no_commit_is_not_followed(repository: Path) -> None:
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("../../outside")
    assert find_snapshot("org/name") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", True),
        ("Qwen/Qwen3-30B-A3B", True),
        ("name", False),
        ("a/b/c", False),
        ("../name", False),
        ("/x", False),
    ],
)
def test_hub_ids_are_two_plain_names(text: str, expected: bool) -> None:
    assert is_hub_id(text) is expected
