"""Uploaded files and their records, on disk. The functions that write are slow: call them on a thread."""

from __future__ import annotations

import os
import re
import secrets
import string
import time
from pathlib import Path

import msgspec

from kt_runtime.errors import InvalidValueError, NotFoundError
from kt_runtime.files import fsync_directory, read_regular, write_json
from kt_runtime.serve.finetuning.protocol.bodies import MethodName

MAX_FILES, MAX_TOTAL_BYTES = 1000, 8 * 1024**3
PURPOSE = "fine-tune"
ID_PATTERN = re.compile(r"file-[A-Za-z0-9]{24}")
MAX_RECORD_BYTES = 64 * 1024
ALPHABET = string.ascii_letters + string.digits


def new_id(prefix: str, characters: int = 24) -> str:
    return prefix + "".join(secrets.choice(ALPHABET) for _ in range(characters))


class FileRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`method`: the one that the rows are for. `created_at`: Unix time, seconds."""

    format: int = 1
    id: str
    filename: str
    size_bytes: int
    num_rows: int
    method: MethodName
    created_at: int

    def shown(self) -> dict[str, object]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": PURPOSE,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """`directory`: of the server, which holds a lock on it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._records: dict[str, FileRecord] = {}
        self.unreadable: list[str] = []
        for path in sorted(directory.glob("file-*.json")):
            try:
                record = msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES), type=FileRecord)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                self.unreadable.append(f"{path}: {error}")
                continue
            if ID_PATTERN.fullmatch(record.id) and path.stem == record.id and self.path(record.id).is_file():
                self._records[record.id] = record

    def path(self, file_id: str) -> Path:
        assert ID_PATTERN.fullmatch(file_id), file_id
        return self._directory / f"{file_id}.jsonl"

    def temporary(self) -> Path:
        """Where an upload is written; `directory.claimed` removes what a crash leaves."""
        return self._directory / f".tmp-{secrets.token_hex(8)}"

    def check_room(self, size_bytes: int) -> None:
        """Raises InvalidValueError if there is no place for another file of this size."""
        total = size_bytes + sum(record.size_bytes for record in self._records.values())
        if len(self._records) >= MAX_FILES:
            raise InvalidValueError(f"there are {MAX_FILES} files, and no more are kept; delete some")
        if total > MAX_TOTAL_BYTES:
            raise InvalidValueError(f"all files would have {total} bytes, of {MAX_TOTAL_BYTES}; delete some")

    def add(self, uploaded: Path, filename: str, method: MethodName, num_rows: int) -> FileRecord:
        """Takes the file `uploaded` over. The record is written last: without it there is no file."""
        record = FileRecord(
            id=new_id("file-"),
            filename=filename,
            size_bytes=uploaded.stat().st_size,
            num_rows=num_rows,
            method=method,
            created_at=int(time.time()),
        )
        with uploaded.open("rb") as file:
            os.fsync(file.fileno())
        uploaded.rename(self.path(record.id))
        fsync_directory(self._directory)
        write_json(self._record_path(record.id), msgspec.to_builtins(record), private=True)
        self._records[record.id] = record
        return record

    def get(self, file_id: str, param: str = "") -> FileRecord:
        """Raises NotFoundError."""
        record = self._records.get(file_id)
        if record is None:
            raise NotFoundError(f"{f'{param}: ' if param else ''}no such file: {file_id[:64]!r}")
        return record

    def list_all(self) -> list[FileRecord]:
        """The newest first."""
        return sorted(self._records.values(), key=lambda record: (record.created_at, record.id), reverse=True)

    def remove(self, file_id: str) -> None:
        """Raises NotFoundError."""
        record = self.get(file_id)
        self._record_path(record.id).unlink(missing_ok=True)
        self.path(record.id).unlink(missing_ok=True)
        self._records.pop(file_id, None)

    def _record_path(self, file_id: str) -> Path:
        return self._directory / f"{file_id}.json"
