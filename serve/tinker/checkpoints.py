"""What Tinker clients saved, on disk: paths of the form tinker://RUN/KIND/NAME, and records next to the weights.

    ROOT/RUN/run.json                           `RunRecord`
    ROOT/RUN/weights/NAME/                      a training checkpoint: the resident's `save`, a PEFT directory
    ROOT/RUN/weights/NAME.json                  `CheckpointRecord`
    ROOT/RUN/sampler_weights/NAME.json          `CheckpointRecord`; the weights are the adapter that it names

ROOT is `.tinker` in the adapter directory; RUN is the run's id with "." for ":". A record is written after what it
describes, so a crash leaves no record of half a checkpoint. The functions are slow: call them on a thread.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from kt_runtime.errors import ConflictError, InvalidValueError, NotFoundError
from kt_runtime.files import errors_of_path, read_regular, write_json

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
TYPES = {"weights": "training", "sampler_weights": "sampler"}
SCHEME = "tinker://"
RUN_PATTERN = re.compile(r"[A-Za-z0-9]{1,64}:train:[0-9]{1,16}")
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
MAX_RECORD_BYTES = 1 << 20
DIRECTORY = ".tinker"


class RunRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`targets`: as in the training protocol. `created_at`: Unix time, seconds."""

    format: int = 1
    run_id: str
    base_model: str
    rank: int
    alpha: float
    targets: list[str]
    train_attn: bool
    train_mlp: bool
    seed: int
    created_at: float
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)


class CheckpointRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`adapter`: the name under which it is served, None: it is not. `version`: the hash of its weights."""

    format: int = 1
    run_id: str
    kind: Kind
    name: str
    created_at: float
    version: str
    adapter: str | None = None
    size_bytes: int = 0
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.kind}/{self.name}"

    def shown(self) -> dict[str, object]:
        """The SDK's `Checkpoint`. The adapter's name is among the user's metadata, where every client shows it."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": TYPES[self.kind],
            "time": moment(self.created_at),
            "tinker_path": self.path,
            "size_bytes": self.size_bytes,
            "public": False,
            "user_metadata": {**self.user_metadata, **({"adapter": self.adapter} if self.adapter else {})},
        }


def moment(unix_time: float) -> str:
    return datetime.datetime.fromtimestamp(unix_time, datetime.UTC).isoformat()


@dataclass(frozen=True)
class CheckpointPath:
    run_id: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, path: str) -> CheckpointPath:
        """Raises InvalidValueError unless `path` is tinker://RUN/KIND/NAME with names of this server's form."""
        parts = path.removeprefix(SCHEME).split("/")
        if path.startswith(SCHEME) and len(parts) == 3:
            run_id, kind, name = parts
            if RUN_PATTERN.fullmatch(run_id) and kind in KINDS and NAME_PATTERN.fullmatch(name):
                return cls(run_id, kind, name)  # type: ignore[arg-type]
        raise InvalidValueError(
            f"checkpoint path {path[:200]!r}: must be tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME, "
            "as this server returned it"
        )

    def __str__(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.kind}/{self.name}"


def adapter_of(run_id: str) -> str:
    """The run's name where ":" is not allowed: of its directory, its session in the resident, its latest adapter."""
    return run_id.replace(":", ".")


def checked_name(name: str) -> str:
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidValueError(
            f"checkpoint name {name[:140]!r}: must be 1 to 128 of A-Z a-z 0-9 _ . -, beginning with a letter or digit"
        )
    return name


_R = TypeVar("_R", RunRecord, CheckpointRecord)


class Checkpoints:
    """`adapter_directory`: of the server, which holds a lock on it."""

    def __init__(self, adapter_directory: Path) -> None:
        self._adapter_directory, self.root = adapter_directory, adapter_directory / DIRECTORY

    def version_directory(self, adapter: str, version: str) -> Path:
        """Where the resident keeps a published version (`kt_runtime.adapters.version_store`)."""
        return self._adapter_directory / adapter / version

    def directory(self, path: CheckpointPath) -> Path:
        """Where a training checkpoint's weights are."""
        return self._place(path.run_id) / path.kind / path.name

    def begin(self, run: RunRecord) -> None:
        """Records the run, before its first checkpoint. Raises OSError's message as ConflictError."""
        place = self._place(run.run_id)
        with errors_of_path(place, "written"):
            if not self._adapter_directory.is_dir():  # it was there: a disk that has gone is not replaced
                raise FileNotFoundError(errno.ENOENT, "the adapter directory is gone", str(place))
            for kind in KINDS:
                (place / kind).mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(place / "run.json", msgspec.to_builtins(run), private=True)

    def add(self, record: CheckpointRecord) -> None:
        path = self._record_path(CheckpointPath(record.run_id, record.kind, record.name))
        with errors_of_path(path, "written"):
            write_json(path, msgspec.to_builtins(record), private=True)

    def find(self, path: CheckpointPath) -> CheckpointRecord:
        """Raises NotFoundError."""
        record = self._read(self._record_path(path), CheckpointRecord)
        if record is None:
            raise NotFoundError(f"{path}: no such checkpoint on this server")
        return record

    def run(self, run_id: str) -> RunRecord | None:
        if not RUN_PATTERN.fullmatch(run_id):
            return None
        return self._read(self._place(run_id) / "run.json", RunRecord)

    def runs(self) -> list[RunRecord]:
        """The newest first."""
        found = [self._read(path, RunRecord) for path in self._files(self.root, "*/run.json")]
        return sorted((run for run in found if run is not None), key=lambda run: run.created_at, reverse=True)

    def of_run(self, run_id: str) -> list[CheckpointRecord]:
        """The newest first."""
        place = self._place(run_id)
        found = [self._read(path, CheckpointRecord) for kind in KINDS for path in self._files(place / kind, "*.json")]
        return sorted((one for one in found if one is not None), key=lambda one: one.created_at, reverse=True)

    def remove(self, path: CheckpointPath) -> CheckpointRecord:
        """Removes the record, then the weights of a training checkpoint. Raises NotFoundError."""
        record = self.find(path)
        self._record_path(path).unlink(missing_ok=True)
        shutil.rmtree(self.directory(path), ignore_errors=True)
        return record

    def check_free(self, path: CheckpointPath) -> None:
        """Raises ConflictError for a path with a checkpoint."""
        with contextlib.suppress(NotFoundError):
            self.find(path)
            raise ConflictError(f"{path} exists already; choose another name, or save with overwrite")

    def _place(self, run_id: str) -> Path:
        assert RUN_PATTERN.fullmatch(run_id), run_id
        return self.root / adapter_of(run_id)

    def _record_path(self, path: CheckpointPath) -> Path:
        return self._place(path.run_id) / path.kind / f"{path.name}.json"

    @staticmethod
    def _files(directory: Path, pattern: str) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError):
            yield from directory.glob(pattern)

    @staticmethod
    def _read(path: Path, kind: type[_R]) -> _R | None:
        try:
            return msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidValueError(f"{path}: can't be read: {error}") from None


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*") if path.is_file())
