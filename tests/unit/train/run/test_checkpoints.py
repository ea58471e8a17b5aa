"""What is a checkpoint, which one a run resumes from, and which ones are removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kt_runtime.errors import ConflictError, InvalidValueError, NotFoundError
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run import checkpoints


@pytest.fixture
def make(tmp_path: Path) -> Any:
    (tmp_path / "out").mkdir()

    def checkpoint(step: int, *, optimizer: bool = True, arrays: Any = None, run: int = 1) -> Path:
        path = checkpoints.checkpoint_path(tmp_path / "out", step)
        path.mkdir()
        for name in (*checkpoints.ADAPTER_FILES, *[checkpoints.OPTIMIZER_FILE] * optimizer):
            (path / name).write_bytes(b"x")
        checkpoints.finish_checkpoint(path, {"global_step": step}, {"identity": {}, "run": run}, arrays or {})
        return path

    return checkpoint


def test_the_last_one_is_the_highest_step_of_the_latest_run(make: Any, make_recipe: Callable[..., Recipe]) -> None:
    for step, run in ((10, 2), (9, 2), (500, 1)):  # the order of time says nothing
        make(step, run=run)
    found = checkpoints.checkpoints(make_recipe().output_dir)[0]
    assert [checkpoint.step for checkpoint in found] == [500, 9, 10]
    resumed = checkpoints.to_resume(make_recipe(resume_from_checkpoint=True))
    assert resumed and resumed.step == 10
    out = make_recipe().output_dir
    assert checkpoints.run_number(out, resumed) == 2  # the same run continues
    assert checkpoints.run_number(out, None) == checkpoints.run_number(out, found[0]) == 3


def test_an_output_directory_means_its_last_checkpoint(
    make: Any, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    make(3)
    make(20)
    elsewhere = make_recipe(resume_from_checkpoint=tmp_path / "out", output_dir=tmp_path / "new")
    found = checkpoints.to_resume(elsewhere)
    assert found and found.step == 20
    for step in (3, 20):
        (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").unlink()
    with pytest.raises(
        NotFoundError,
        match=r"out has no complete checkpoint; .*checkpoint-20: has no trainer_state.json: .*not finished",
    ):
        checkpoints.to_resume(elsewhere)
    with pytest.raises(InvalidValueError, match=r"model: has no trainer_state.json: it is no checkpoint"):
        (tmp_path / "model").mkdir()
        checkpoints.to_resume(make_recipe(resume_from_checkpoint=tmp_path / "model"))


def test_arrays_come_back_bit_for_bit(make: Any) -> None:
    array = np.array([[0.1, np.nan], [-3.5, 2.0]], np.float32)
    back = checkpoints.read_checkpoint(make(1, arrays={"reference": array})).arrays()
    assert back["reference"].tobytes() == array.tobytes()


def test_pruning_keeps_the_last_and_the_best(make: Any, tmp_path: Path) -> None:
    paths = {step: make(step) for step in (1, 2, 3, 4)}
    assert checkpoints.prune(tmp_path / "out", None, None) == []
    assert checkpoints.prune(tmp_path / "out", 2, paths[1]) == [paths[2], paths[3]]
    assert checkpoints.prune(tmp_path / "out", 1, paths[1]) == []
    assert checkpoints.prune(tmp_path / "out", 1, None) == [paths[1]] and paths[4].is_dir()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda path: (path / "trainer_state.json").unlink(), "not finished being written"),
        (lambda path: (path / "trainer_state.json").write_text('{"global_step": 1}'), "not the state of a kt-runtime"),
        (lambda path: (path / "trainer_state.json").write_text("{"), "not the state of a kt-runtime"),
        (lambda path: (path / "adapter_config.json").unlink(), "adapter_config.json is missing"),
    ],
)
def test_a_broken_checkpoint_is_named_or_left_out(
    make: Any, make_recipe: Callable[..., Recipe], break_it: Any, message: str
) -> None:
    path = make(1)
    break_it(path)
    with pytest.raises(InvalidValueError, match=message):
        checkpoints.to_resume(make_recipe(resume_from_checkpoint=path))
    with pytest.raises(NotFoundError, match=rf"has no complete checkpoint; .*checkpoint-1.*{message}"):
        checkpoints.to_resume(make_recipe(resume_from_checkpoint=True))
    assert checkpoints.to_resume(make_recipe()) is None


def test_another_format_is_refused(make: Any) -> None:
    path = make(1)
    state = json.loads((path / "trainer_state.json").read_text())
    state["kt_runtime"]["format"] = 2
    (path / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(InvalidValueError, match="format 2; this version reads format 1"):
        checkpoints.read_checkpoint(path)


def test_what_a_run_resumes_from(make: Any, make_recipe: Callable[..., Recipe]) -> None:
    assert checkpoints.to_resume(make_recipe()) is None
    make(3)
    found = checkpoints.to_resume(make_recipe())
    assert found and found.step == 3
    assert checkpoints.to_resume(make_recipe(overwrite_output_dir=True)) is None
    with pytest.raises(ConflictError, match="holds checkpoint-3 of an earlier run"):
        checkpoints.to_resume(make_recipe(resume_from_checkpoint=False))
    make(4, optimizer=False)
    with pytest.raises(ConflictError, match="without its optimizer's state"):
        checkpoints.to_resume(make_recipe())


def test_copying_replaces_whole_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"new")
    (tmp_path / "b").write_bytes(b"older")
    checkpoints.copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 2
