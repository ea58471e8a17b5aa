"""Checkpoints of a run: `checkpoint-N/` in its output directory, and which of them a run resumes from.

    adapter_config.json, adapter_model.safetensors    a PEFT adapter that anybody can serve
    session.json, optimizer.safetensors               what the resident needs to resume (absent with save_only_model)
    reference.safetensors                             DPO: the reference's log-probabilities computed so far
    trainer_state.json                                what the trainer needs to resume; Hugging Face's keys, and ours

A checkpoint is written under a temporary name and renamed to `checkpoint-N` when it is complete, so an older checkpoint
of the same step stays whole until then. A directory without `trainer_state.json` is incomplete; no run resumes from it.

The last of several checkpoints in a directory is the one with the highest step of the latest run: a restarted run may
be at step 10 in a directory with an older run's step 500. The state's `run` counts the runs.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.errors import ConflictError, InvalidValueError, KtError, NotFoundError
from kt_runtime.files import TEMPORARY_PREFIX, fsync_directory, visible_entries, write_file, write_json
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run.run_identity import LATER

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
ARRAYS_FILE = "reference.safetensors"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
RESULT_FILES = ("all_results.json", "eval_results.json", "train_results.json", STATE_FILE)
OURS = "kt_runtime"
FORMAT = 1
PREFIX = "checkpoint-"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. `state`: its `trainer_state.json`. `run`: from 1; 0 before runs were counted."""

    path: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["global_step"])

    @property
    def run(self) -> int:
        return int(self.ours.get("run", 0))

    @property
    def ours(self) -> Mapping[str, Any]:
        """The part of the state that is not Hugging Face's."""
        ours: Mapping[str, Any] = self.state[OURS]
        return ours

    def arrays(self) -> dict[str, Any]:
        """The `arrays` of `finish_checkpoint`, as numpy arrays."""
        path = self.path / ARRAYS_FILE
        if not path.is_file():
            return {}
        from safetensors.numpy import load_file

        return load_file(path)


def checkpoint_path(output_dir: Path, step: int) -> Path:
    return (output_dir / f"{PREFIX}{step}").resolve()


def finish_checkpoint(path: Path, state: Mapping[str, Any], ours: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Completes the directory that the resident has written at `path`. `ours` becomes `Checkpoint.ours`."""
    if arrays:
        from safetensors.numpy import save

        write_file(path / ARRAYS_FILE, save(dict(arrays)))
    write_json(path / STATE_FILE, {**state, OURS: {"format": FORMAT, "saved_at": time.time(), **ours}})


def read_checkpoint(path: Path) -> Checkpoint:
    """Raises NotFoundError or InvalidValueError, naming what is missing."""
    if not path.is_dir():
        raise NotFoundError(f"{path}: no such checkpoint")
    where = path / STATE_FILE
    if not where.is_file():
        raise InvalidValueError(f"{path}: has no {STATE_FILE}: it is no checkpoint, or was not finished being written")
    try:
        state = json.loads(where.read_bytes())
        ours = state[OURS]
        found = ours["format"]
        checkpoint = Checkpoint(path.resolve(), state)
        _ = checkpoint.step, checkpoint.run
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(
            f"{where}: is not the state of a kt-runtime checkpoint ({type(error).__name__}: {error}); a run's results "
            "and other trainers' checkpoints can't be resumed: name their adapter by adapter_name_or_path"
        ) from None
    if found != FORMAT:
        raise InvalidValueError(f"{where}: format {found!r}; this version reads format {FORMAT}")
    missing = [name for name in ADAPTER_FILES if not (path / name).is_file()]
    if missing:
        raise InvalidValueError(f"{path}: {missing[0]} is missing")
    return checkpoint


def checkpoints(output_dir: Path) -> tuple[list[Checkpoint], list[Path]]:
    """(complete checkpoints, the last one at the end; incomplete ones)."""
    complete, incomplete = [], []
    for path in visible_entries(output_dir):
        if path.is_dir() and path.name.removeprefix(PREFIX).isdecimal() and path.name.startswith(PREFIX):
            try:
                complete.append(read_checkpoint(path))
            except (InvalidValueError, NotFoundError):
                incomplete.append(path)
    return sorted(complete, key=lambda checkpoint: (checkpoint.run, checkpoint.step)), incomplete


def run_number(output_dir: Path, resumed_from: Checkpoint | None) -> int:
    """The number of the run that begins now: the last checkpoint's if the run resumes from it, otherwise a new one."""
    complete = checkpoints(output_dir)[0]
    if resumed_from and complete and complete[-1].path == resumed_from.path:
        return resumed_from.run
    return 1 + max((checkpoint.run for checkpoint in complete), default=0)


def temporary_path(path: Path) -> Path:
    """The temporary name under which the checkpoint `path` is written."""
    return path.with_name(TEMPORARY_PREFIX + path.name)


def remove_unfinished(output_dir: Path) -> None:
    """Removes what a trainer left behind that died while saving. No other trainer may be saving there."""
    for path in output_dir.glob(f"{TEMPORARY_PREFIX}{PREFIX}*"):
        shutil.rmtree(path)


def to_resume(recipe: Recipe) -> Checkpoint | None:
    """The checkpoint that the recipe resumes from; None: the run begins at step 0.

    `resume_from_checkpoint`: a checkpoint, or a directory whose last complete checkpoint is used; true: the output
    directory. Without it, a run resumes from the last complete checkpoint in the output directory, unless
    `overwrite_output_dir`. A run that only evaluates resumes from none, and replaces nothing. Raises ConflictError for
    an output directory with results but no checkpoint to resume from, NotFoundError and InvalidValueError.
    """
    asked = recipe.resume_from_checkpoint
    if isinstance(asked, Path):
        return _with_optimizer(_last_in(asked, asked) if any(checkpoints(asked)) else read_checkpoint(asked))
    if asked is True:
        return _with_optimizer(_last_in(recipe.output_dir, "true"))
    complete, _ = checkpoints(recipe.output_dir)
    if recipe.overwrite_output_dir or not recipe.do_train:
        return None
    if complete and asked is None:
        return _with_optimizer(complete[-1])
    results = [name for name in (*ADAPTER_FILES, *RESULT_FILES) if (recipe.output_dir / name).exists()]
    if complete or results:
        held = complete[-1].path.name if complete else results[0]
        raise ConflictError(
            f"output_dir: {recipe.output_dir}: holds {held} of an earlier run"
            f"{'' if complete else ' and no checkpoint to resume from'}; choose another directory, or set "
            "overwrite_output_dir: true to start over"
        )
    return None


def check_same_run(checkpoint: Checkpoint, identity: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Raises ConflictError, naming the differences, if `checkpoint` is from a different run.

    `identity`: values that must be equal. `settings`: values that may change; the result has a line for each change.
    """
    was = {**LATER, **checkpoint.ours["identity"]}
    differing = [key for key in identity if was.get(key) != identity[key]]
    if differing:
        lines = "".join(f"\n  {key}: was {was.get(key)!r}, is {identity[key]!r}" for key in differing)
        raise ConflictError(
            f"{checkpoint.path}: another run wrote it, so this run can't resume from it:{lines}\n  restore the old "
            "values, or start a new run in another output_dir"
        )
    old = checkpoint.ours["settings"]
    return [
        f"{key}: was {old.get(key)!r} in {checkpoint.path.name}, is {value!r} from here on"
        for key, value in settings.items()
        if old.get(key) != value
    ]


def prune(output_dir: Path, limit: int | None, keep: Path | None) -> list[Path]:
    """Removes the oldest complete checkpoints beyond `limit`, never the last one and never `keep`; returns them."""
    complete = checkpoints(output_dir)[0] if limit else []
    removed: list[Path] = []
    for checkpoint in complete[:-1]:
        if len(complete) - len(removed) <= (limit or 0):
            break
        if keep is None or checkpoint.path != keep.resolve():
            remove(checkpoint.path)
            removed.append(checkpoint.path)
    return removed


def remove(path: Path) -> None:
    """Deletes `trainer_state.json` first, so that an interrupted removal leaves no complete checkpoint."""
    (path / STATE_FILE).unlink(missing_ok=True)
    fsync_directory(path)
    shutil.rmtree(path)


def copy_file(source: Path, target: Path) -> None:
    """As `files.write_file`, without loading the content into memory."""
    descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file, source.open("rb") as original:
            shutil.copyfileobj(original, file, 1 << 22)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_directory(target.parent)


def _last_in(directory: Path, asked: Path | str) -> Checkpoint:
    complete, incomplete = checkpoints(directory)
    if complete:
        return complete[-1]
    reason = ""
    try:
        for path in incomplete[:1]:
            read_checkpoint(path)
    except KtError as error:
        reason = f"; {error}"
    raise NotFoundError(f"resume_from_checkpoint: {asked}: {directory} has no complete checkpoint{reason}")


def _with_optimizer(checkpoint: Checkpoint) -> Checkpoint:
    if not (checkpoint.path / OPTIMIZER_FILE).is_file():
        raise ConflictError(
            f"{checkpoint.path}: holds the adapter without its optimizer's state (save_only_model: true), so training "
            "can't resume from it; name it by adapter_name_or_path in a new run, or set overwrite_output_dir: true to "
            "start over"
        )
    return checkpoint
