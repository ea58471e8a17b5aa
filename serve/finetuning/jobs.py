"""The records of jobs, on disk. A record is written at every change of state."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any, Literal

import msgspec

from kt_runtime.errors import InvalidValueError, NotFoundError
from kt_runtime.files import read_regular, write_json
from kt_runtime.serve.finetuning.protocol.bodies import MethodName

Status = Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled"]
ENDED: tuple[Status, ...] = ("succeeded", "failed", "cancelled")
ID_PATTERN = re.compile(r"ftjob-[A-Za-z0-9]{24}")
MAX_JOBS = 1000
MAX_RECORD_BYTES = 1 << 20
RECORD_FILE = "job.json"


class JobError(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`param`: the request's field that was wrong, None for another cause."""

    code: str
    message: str
    param: str | None = None


class CheckpointRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`model`: the name under which the adapter of this step is served."""

    id: str
    step: int
    model: str
    created_at: int
    metrics: dict[str, float]


class JobRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`model`: as the client named it. `start`: the adapter that training continues from, None: the base alone.

    `result`: the name that the trained adapter gets. `hyperparameters`: as given, then with all decided. `grader`: of
    method reinforcement, as given. `restarts`: how often a restart of the server has interrupted it. `sequence`: of its
    creation, which orders jobs. Times: Unix time, seconds.
    """

    format: int = 1
    id: str
    sequence: int
    model: str
    start: str | None
    result: str
    method: MethodName
    hyperparameters: dict[str, Any]
    grader: dict[str, Any] | None
    training_file: str
    validation_file: str | None
    suffix: str | None
    seed: int
    metadata: dict[str, str]
    created_at: int
    status: Status = "validating_files"
    finished_at: int | None = None
    error: JobError | None = None
    trained_tokens: int | None = None
    checkpoints: list[CheckpointRecord] = msgspec.field(default_factory=list)
    restarts: int = 0

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class JobStore:
    """`root`: the directory of `finetuning_directory`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._records: dict[str, JobRecord] = {}
        self.unreadable: list[str] = []
        self._lock = threading.Lock()
        for path in sorted((root / "jobs").glob(f"ftjob-*/{RECORD_FILE}")):
            try:
                record = msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES), type=JobRecord)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                self.unreadable.append(f"{path}: {error}")
                continue
            if ID_PATTERN.fullmatch(record.id) and path.parent.name == record.id:
                self._records[record.id] = record

    def place(self, job_id: str) -> Path:
        """The directory of the job's recipe, data, events and the trainer's output."""
        assert ID_PATTERN.fullmatch(job_id), job_id
        return self._root / "jobs" / job_id

    def output(self, job_id: str) -> Path:
        """The output directory of the job's recipe. Its last part, the id, begins the name of the trainer's session."""
        assert ID_PATTERN.fullmatch(job_id), job_id
        return self._root / "runs" / job_id

    def next_sequence(self) -> int:
        return 1 + max((record.sequence for record in self._records.values()), default=0)

    def add(self, record: JobRecord) -> None:
        """Raises InvalidValueError if there are too many jobs, and OSError."""
        if len(self._records) >= MAX_JOBS:
            raise InvalidValueError(
                f"there are {MAX_JOBS} jobs, and no more are kept; remove directories of jobs and restart the server"
            )
        self.place(record.id).mkdir(mode=0o700)
        self.save(record)
        self._records[record.id] = record

    def save(self, record: JobRecord) -> None:
        """Callable from any thread. The record's state is read under the lock: of two writes the newer stays."""
        with self._lock:
            write_json(self.place(record.id) / RECORD_FILE, msgspec.to_builtins(record), private=True)

    def get(self, job_id: str) -> JobRecord:
        """Raises NotFoundError."""
        record = self._records.get(job_id)
        if record is None:
            raise NotFoundError(f"no such fine-tuning job: {job_id[:64]!r}")
        return record

    def list_all(self) -> list[JobRecord]:
        """The newest first."""
        return sorted(self._records.values(), key=lambda record: record.sequence, reverse=True)
