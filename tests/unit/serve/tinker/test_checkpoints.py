"""Checkpoint paths and records: nothing outside the store can be named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kt_runtime.errors import ConflictError, InvalidValueError, NotFoundError
from kt_runtime.serve.tinker.checkpoints import CheckpointPath, CheckpointRecord, Checkpoints, RunRecord

RUN = "s1:train:0"


def run() -> RunRecord:
    return RunRecord(
        run_id=RUN,
        base_model="tiny",
        rank=4,
        alpha=32.0,
        targets=["experts"],
        train_attn=False,
        train_mlp=True,
        seed=1,
        created_at=1.0,
    )


def record(name: str, created_at: float = 2.0) -> CheckpointRecord:
    return CheckpointRecord(run_id=RUN, kind="weights", name=name, created_at=created_at, version="v")


def test_a_run_is_not_recorded_where_the_adapter_directory_was(tmp_path: Path) -> None:
    """As at the mount's point of a disk that has gone."""
    checkpoints = Checkpoints(tmp_path / "adapters")
    with pytest.raises(InvalidValueError, match="the adapter directory is gone"):
        checkpoints.begin(run())
    assert not (tmp_path / "adapters").exists()


@pytest.mark.parametrize(
    "path",
    [
        "",
        "a",
        "/etc/passwd",
        "tinker://",
        "tinker://s1:train:0/weights",
        "tinker://s1:train:0/weights/",
        "tinker://s1:train:0/weights/..",
        "tinker://s1:train:0/weights/.hidden",
        "tinker://../weights/a",
        "tinker://s1:train:0/../a",
        "tinker://s1:train:0/weights/a/../../../b",
        "tinker://s1:train:0/external_weights/a",
        "tinker://s1.train.0/weights/a",
        "tinker://s1:train:0/weights/a\0",
        "tinker://s1:train:0/weights/%2e%2e",
        "tinker://s1:train:0/weights/" + "a" * 129,
        "tinker://ѕ1:train:0/weights/a",
        "file://s1:train:0/weights/a",
    ],
)
def test_another_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidValueError, match="checkpoint path"):
        CheckpointPath.parse(path)


def test_records_are_found_again_the_newest_first(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.begin(run())
    store.add(record("first", 2.0))
    store.add(record("second", 3.0))
    again = Checkpoints(tmp_path)
    assert again.runs() == [run()] and again.run(RUN) == run()
    assert [one.name for one in again.of_run(RUN)] == ["second", "first"]
    path = CheckpointPath.parse(f"tinker://{RUN}/weights/first")
    assert again.find(path).path == str(path)
    with pytest.raises(ConflictError, match="exists already"):
        again.check_free(path)
    again.check_free(CheckpointPath.parse(f"tinker://{RUN}/weights/third"))


def test_a_removed_checkpoint_is_gone_with_its_weights(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.begin(run())
    path = CheckpointPath(RUN, "weights", "one")
    store.directory(path).mkdir()
    store.add(record("one"))
    store.remove(path)
    assert not store.directory(path).exists() and store.of_run(RUN) == []
    with pytest.raises(NotFoundError):
        store.remove(path)


def test_half_a_checkpoint_is_not_listed(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.begin(run())
    store.directory(CheckpointPath(RUN, "weights", "half")).mkdir()
    assert store.of_run(RUN) == []


def test_an_unknown_run_is_none(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    assert store.run(RUN) is None and store.run("../..") is None and store.runs() == []
