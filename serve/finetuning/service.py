"""The fine-tuning API as one object: a method per endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.serve.finetuning.files import FileRecord, FileStore, new_id
from kt_runtime.serve.finetuning.jobs import JobRecord, JobStore
from kt_runtime.serve.finetuning.objects import page, shown_checkpoints, shown_job
from kt_runtime.serve.finetuning.protocol import bodies
from kt_runtime.serve.finetuning.protocol.graders import read_grader
from kt_runtime.serve.finetuning.protocol.rows import check_file
from kt_runtime.serve.finetuning.queue import JobQueue
from kt_runtime.serve.finetuning.recipe import result_name
from kt_runtime.serve.finetuning.upload import Upload
from kt_runtime.serve.http.route_table import FILE_BYTES
from kt_runtime.serve.requests.checks.refusal import Refusal

UPLOADS_AT_ONCE = 16
CHECKS_AT_ONCE = 1  # a thread, and seconds of Python's global lock by turns for the largest files


class Models(Protocol):
    """The part of `serve/requests/checks/served.py: ServedModels` that jobs use."""

    name: str

    @property
    def reserved(self) -> frozenset[str]: ...

    @property
    def adapters(self) -> Callable[[], Any]: ...

    def check(self, request: Any) -> None: ...


class FineTuning:
    """Belongs to the HTTP server's event loop. Methods raise UserError, Refusal and OSError."""

    def __init__(self, files: FileStore, jobs: JobStore, queue: JobQueue, models: Models) -> None:
        self._files, self._jobs, self._queue, self._models = files, jobs, queue, models
        self._uploads, self._checks = asyncio.Semaphore(UPLOADS_AT_ONCE), asyncio.Semaphore(CHECKS_AT_ONCE)

    # Files.

    async def upload(self, content_type: str, parts: AsyncIterator[bytes]) -> dict[str, Any]:
        """`parts`: of the body, which the middleware bounds. The whole file is checked before it is kept."""
        async with self._uploads:
            self._files.check_room(0)
            temporary = self._files.temporary()
            try:
                filename = await self._receive(temporary, content_type, parts)
                async with self._checks:
                    record = await asyncio.to_thread(self._checked, temporary, filename)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
        return record.shown()

    async def _receive(self, temporary: Path, content_type: str, parts: AsyncIterator[bytes]) -> str:
        with temporary.open("xb") as file:
            temporary.chmod(0o600)
            upload = Upload(content_type, file)
            async for part in parts:
                upload.feed(part)
            return upload.finish()

    def _checked(self, temporary: Path, filename: str) -> FileRecord:
        size_bytes = temporary.stat().st_size
        if size_bytes > FILE_BYTES:
            raise Refusal(413, f"the file has {size_bytes} bytes; this server takes {FILE_BYTES}", "file")
        self._files.check_room(size_bytes)
        try:
            method, num_rows = check_file(temporary)
        except InvalidValueError as error:
            raise Refusal(400, f"{filename}: {error}", "file", "invalid_file_format") from None
        return self._files.add(temporary, filename, method, num_rows)

    def list_files(self, query: bodies.FilesQuery) -> dict[str, Any]:
        shown = [record.shown() for record in self._files.list_all()]
        if query.purpose is not None:
            shown = [one for one in shown if one["purpose"] == query.purpose]
        if query.order == "asc":
            shown.reverse()
        return page(shown, query.after, query.limit)

    def file(self, file_id: str) -> dict[str, Any]:
        return self._files.get(file_id).shown()

    def content(self, file_id: str) -> tuple[Path, str]:
        """(the file, the name that the client gave it)."""
        record = self._files.get(file_id)
        return self._files.path(record.id), record.filename

    async def delete_file(self, file_id: str) -> dict[str, Any]:
        """Jobs whose files were checked have a copy of their own."""
        await asyncio.to_thread(self._files.remove, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    # Jobs.

    async def create(self, body: bodies.CreateJob) -> dict[str, Any]:
        self._models.check(body)
        method, hyperparameters, grader = _method_of(body)
        for param, file_id in (("training_file", body.training_file), ("validation_file", body.validation_file)):
            if file_id is not None:
                self._check_file(param, file_id, method)
        base, start = self._base_and_start(body.model)
        job = JobRecord(
            id=new_id("ftjob-"),
            sequence=self._jobs.next_sequence(),
            model=body.model,
            start=start,
            result=result_name(base, body.suffix, new_id("", 8)),
            method=method,
            hyperparameters=hyperparameters,
            grader=grader,
            training_file=body.training_file,
            validation_file=body.validation_file,
            suffix=body.suffix,
            seed=secrets.randbits(31) if body.seed is None else body.seed,
            metadata=body.metadata or {},
            created_at=int(time.time()),
        )
        self._jobs.add(job)
        await asyncio.to_thread(lambda: self._queue.events(job).note(f"Created fine-tuning job: {job.id}"))
        self._queue.submit(job)
        return shown_job(job)

    def _check_file(self, param: str, file_id: str, method: bodies.MethodName) -> None:
        held = self._files.get(file_id, param).method
        if held != method:
            raise Refusal(
                400,
                f"{param} {file_id}: its rows are for method {held}, and the job's is {method} (docs/finetuning.md "
                "shows the rows of each)",
                param,
            )

    def _base_and_start(self, model: str) -> tuple[str, str | None]:
        """(the base's name for clients, the adapter that training continues from)."""
        name = model.removeprefix(f"{self._models.name}:").strip()
        if model not in self._models.reserved and name in self._models.adapters():
            return self._models.name, name
        return self._models.name, None

    def list_jobs(self, query: bodies.PageQuery, metadata: dict[str, str]) -> dict[str, Any]:
        """`metadata`: what listed jobs have among theirs."""
        jobs = [job for job in self._jobs.list_all() if metadata.items() <= job.metadata.items()]
        return page([shown_job(job) for job in jobs], query.after, query.limit)

    def job(self, job_id: str) -> dict[str, Any]:
        return shown_job(self._jobs.get(job_id))

    async def cancel(self, job_id: str) -> dict[str, Any]:
        job = self._jobs.get(job_id)
        if job.has_ended:
            raise ConflictError(f"job {job_id} has ended: it is {job.status}")
        await self._queue.cancel(job)
        return shown_job(job)

    async def events(self, job_id: str, query: bodies.PageQuery) -> dict[str, Any]:
        job = self._jobs.get(job_id)
        events = await asyncio.to_thread(lambda: self._queue.events(job).read())
        return page(events[::-1], query.after, query.limit)

    def checkpoints(self, job_id: str, query: bodies.PageQuery) -> dict[str, Any]:
        return page(shown_checkpoints(self._jobs.get(job_id)), query.after, query.limit)


def _method_of(body: bodies.CreateJob) -> tuple[bodies.MethodName, dict[str, Any], dict[str, Any] | None]:
    """(method, given hyperparameters, grader)."""
    method = body.method
    if method is None:
        return "supervised", bodies.given(body.hyperparameters), None
    for name in bodies.METHODS:
        if name != method.type and getattr(method, name) is not None:
            raise Refusal(400, f"method.{name}: the method's type is {method.type!r}", f"method.{name}")
    if body.hyperparameters is not None and bodies.given(body.hyperparameters):
        raise Refusal(400, f"hyperparameters: give them as method.{method.type}.hyperparameters", "hyperparameters")
    if method.type == "reinforcement":
        if method.reinforcement is None:
            raise Refusal(400, "method.reinforcement is missing: it has the grader", "method.reinforcement")
        try:
            read_grader(method.reinforcement.grader)
        except InvalidValueError as error:
            raise Refusal(400, f"method.reinforcement.{error}", "method.reinforcement.grader") from None
        return method.type, bodies.given(method.reinforcement.hyperparameters), method.reinforcement.grader
    chosen = method.dpo if method.type == "dpo" else method.supervised
    return method.type, bodies.given(chosen.hyperparameters if chosen else None), None
