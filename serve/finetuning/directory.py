"""Where files and jobs are kept: `.finetuning` in the adapter directory, or `--finetuning-dir`.

    ROOT/files/file-ID.jsonl, file-ID.json     an uploaded file and its record
    ROOT/jobs/ftjob-ID/                        a job: record, events, recipe, data, the trainer's output
    ROOT/runs/ftjob-ID/                        the output directory of its recipe

All of it may be read by the server's user alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.files import errors_of_path, exclusive_lock, remove_unfinished

DIRECTORY = ".finetuning"
LOCK_FILE = ".lock"
OFF = "off"
PARTS = ("files", "jobs", "runs")


def finetuning_directory(asked: str | None, adapter_directory: Path) -> Path | None:
    """The directory, created if missing; None: the API is switched off. Raises InvalidValueError."""
    if asked == OFF:
        return None
    try:
        place = Path(asked).expanduser().absolute() if asked else adapter_directory / DIRECTORY
    except RuntimeError:  # a user without an entry in passwd, as in some containers
        raise InvalidValueError(f"--finetuning-dir {asked}: name the directory by its full path") from None
    try:
        with errors_of_path(place, "written"):
            for path in (place, *(place / part for part in PARTS)):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            place.chmod(0o700)
    except InvalidValueError as error:
        raise InvalidValueError(f"--finetuning-dir {error}") from None
    return place


@contextlib.contextmanager
def claimed_finetuning(asked: str | None, adapter_directory: Path, say: Callable[[str], None]) -> Iterator[Path | None]:
    """The locked directory, without what an earlier server left half-written; None: the API is switched off.

    A default directory that can't be written switches it off with a line; one that was asked for raises
    InvalidValueError, and one that another server uses ConflictError.
    """
    with contextlib.ExitStack() as held:
        try:
            place = finetuning_directory(asked, adapter_directory)
            if place is not None:
                with errors_of_path(place / LOCK_FILE, "written"):
                    held.enter_context(exclusive_lock(place / LOCK_FILE, f"--finetuning-dir {place}"))
        except ConflictError as error:
            raise ConflictError(f"{error}: one server runs the jobs of a directory; name another one") from None
        except InvalidValueError as error:
            if asked is not None:
                raise
            say(f"no fine-tuning API: {error}")
            place = None
        if place is not None:
            for problem in (problem for part in ("files", "jobs") for problem in remove_unfinished(place / part)):
                say(f"--finetuning-dir: {problem}")
        yield place
