from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kt_runtime.serve.models.hub_cache import find_snapshot, is_hub_id, repository_directory

COMMIT, OTHER = "a" * 40, "b" * 40

VARIABLES = {
    "HF_HUB_CACHE": ("/one", "/one"),
    "HUGGINGFACE_HUB_CACHE": ("/two", "/two"),
    "HF_HOME": ("/three", "/three/hub"),
    "XDG_CACHE_HOME": ("/four", "/four/huggingface/hub"),
}
PROGRAM = "from kt_runtime.serve.models.hub_cache import hub_cache_directory; print(hub_cache_directory())"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path / "models--org--name"


def directory_in(environment: dict[str, str]) -> str:
    run = subprocess.run([sys.executable, "-P", "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_variables_are_read_in_hugging_faces_order() -> None:
    """In processes of their own: huggingface_hub reads the variables once."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    assert directory_in(environment) == str(Path.home() / ".cache/huggingface/hub")
    for name, (value, directory) in reversed(VARIABLES.items()):  # each overrides those after it
        environment[name] = value
        assert directory_in(environment) == directory


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
