"""Runs jobs: files are checked when a job is created, then one job after the other trains, in the order of creation.

A job that a restart of the server has interrupted trains again first: its recipe resumes from the last checkpoint, and
the result is that of an uninterrupted run (docs/recipes.md).
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from kt_runtime.errors import InvalidValueError, KtError, NotFoundError
from kt_runtime.serve.finetuning.events import EventLog, Level
from kt_runtime.serve.finetuning.files import FileStore, new_id
from kt_runtime.serve.finetuning.jobs import CheckpointRecord, JobError, JobRecord, JobStore, Status
from kt_runtime.serve.finetuning.recipe import CHECKPOINTS_KEPT, ServerFacts, WrongFile, checkpoint_name, prepare
from kt_runtime.serve.finetuning.trainer import POLL_SECONDS, Connection, Trainer
from kt_runtime.wire import messages, replies
from kt_runtime.wire.async_client import AsyncResident

logger = logging.getLogger(__name__)

MOST_RESTARTS = 10
CLOSE_SECONDS = 60.0
STATE_FILE, PREFIX = "trainer_state.json", "checkpoint-"
ROLLOUTS = "rollouts-"  # before the session's name, the adapter of a reinforcement job's rollouts


class Adapters(Protocol):
    """The part of `serve/http/adapters.py: Adapters` that jobs use."""

    async def status(self) -> dict[str, Any]: ...

    async def list_all(self) -> list[dict[str, Any]]: ...

    async def load(self, name: str, path: str, *, take_over: bool = False) -> dict[str, Any]: ...

    async def unload(self, name: str) -> dict[str, Any]: ...


class JobQueue:
    """Belongs to the HTTP server's event loop. `is_ready` waits until this server answers trainers.

    `adapter_directory`: of published versions, ROOT/NAME/VERSION.
    """

    def __init__(
        self,
        jobs: JobStore,
        files: FileStore,
        adapters: Adapters,
        resident: AsyncResident,
        facts: ServerFacts,
        adapter_directory: Path,
        connection: Connection,
        is_ready: Callable[[], Awaitable[None]],
    ) -> None:
        self._jobs, self._files, self._adapters, self._resident = jobs, files, adapters, resident
        self._facts, self._adapter_directory, self._connection = facts, adapter_directory, connection
        self._is_ready = is_ready
        self._waiting: list[JobRecord] = []
        self._wake, self._preparing = asyncio.Event(), asyncio.Semaphore(1)
        self._trainer: tuple[JobRecord, Trainer] | None = None
        self._logs: dict[str, EventLog] = {}  # of jobs that have not ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._writes: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Takes up the jobs that an earlier server has left."""
        for job in reversed(self._jobs.list_all()):
            if job.status in ("running", "queued"):
                self._enqueue(job)
            elif job.status == "validating_files":
                self.submit(job)
        self._background(self._run())

    async def close(self) -> None:
        """Called at the server's end. A job in training keeps that state on disk, and the next server resumes it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*self._writes, return_exceptions=True)
        if self._trainer is not None:
            await asyncio.to_thread(self._trainer[1].kill)

    def submit(self, job: JobRecord) -> None:
        self._background(self._validate(job))

    def events(self, job: JobRecord) -> EventLog:
        """Reads the whole file when it is new: call it on a thread."""
        log = self._logs.get(job.id)
        if log is None:
            log = EventLog(self._jobs.place(job.id), self._jobs.output(job.id), job.id)
            if not job.has_ended:
                log = self._logs.setdefault(job.id, log)
        return log

    async def cancel(self, job: JobRecord) -> None:
        """The job must not have ended. Its trainer is stopped in the background."""
        job.status = "cancelled"  # at once: the job's other tasks look at it
        await self._end(job, "cancelled", "The job has been cancelled")
        if self._trainer is not None and self._trainer[0] is job:
            self._background(self._trainer[1].stop())

    # One job.

    async def _validate(self, job: JobRecord) -> None:
        """One job after the other, until it is queued: a later job does not overtake one whose record is still being
        written."""
        async with self._preparing:
            try:
                start = await self._start_of(job)
                decided = await asyncio.to_thread(self._prepared, job, start)
            except WrongFile as error:
                what = "training" if error.param == "training_file" else "validation"
                await self._fail(job, JobError(code=f"invalid_{what}_file", message=str(error), param=error.param))
            except (KtError, OSError) as error:
                await self._fail(job, JobError(code="invalid_job", message=str(error)))
            except Exception as error:  # the boundary: a bug becomes a failed job and a log entry
                logger.exception("checking fine-tuning job %s failed", job.id)
                await self._fail(job, JobError(code="server_error", message=_unexpected(error)))
            else:
                if job.has_ended:
                    return
                job.hyperparameters = decided
                await self._save(job, "queued")
                await self._note(job, "Files validated, moving job to queued state")
                self._enqueue(job)
                self._wake.set()

    def _enqueue(self, job: JobRecord) -> None:
        """Interrupted jobs are at the front. The others are in the order of creation, not in that of their checks."""
        bisect.insort(self._waiting, job, key=lambda one: (one.status != "running", one.sequence))

    def _prepared(self, job: JobRecord, start: Path | None) -> dict[str, Any]:
        named = {"training_file": job.training_file, "validation_file": job.validation_file}
        files = {param: self._files.path(file_id) for param, file_id in named.items() if file_id is not None}
        return prepare(job, self._jobs.place(job.id), self._jobs.output(job.id), files, start, self._facts)

    async def _start_of(self, job: JobRecord) -> Path | None:
        if job.start is None:
            return None
        current = {adapter["name"]: adapter["current"] for adapter in await self._adapters.list_all()}
        if not current.get(job.start):
            raise NotFoundError(f"model {job.model!r} was unloaded before the job had begun")
        return self._adapter_directory / job.start / str(current[job.start])

    async def _run(self) -> None:
        await self._is_ready()
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            job = self._waiting.pop(0)
            if job.has_ended:
                continue
            try:
                await self._train(job)
            except (KtError, OSError) as error:
                await self._fail(job, JobError(code="server_error", message=str(error)))
            except Exception as error:  # the boundary, as above
                logger.exception("fine-tuning job %s failed", job.id)
                await self._fail(job, JobError(code="server_error", message=_unexpected(error)))

    async def _train(self, job: JobRecord) -> None:
        if job.status == "running":
            job.restarts += 1
            if job.restarts > MOST_RESTARTS:
                raise InvalidValueError(f"{MOST_RESTARTS} restarts of the server have interrupted the job")
            await self._note(job, "The server was restarted: the job resumes from its last checkpoint", "warn")
        else:
            await self._note(job, "Fine-tuning job started")
        await self._save(job, "running")
        if job.has_ended:  # cancelled meanwhile
            return
        trainer = Trainer(self._jobs.place(job.id), self._connection)
        self._trainer = job, trainer
        events = await asyncio.to_thread(self.events, job)
        known = {checkpoint.step for checkpoint in job.checkpoints}
        has_ended = False
        while not has_ended:
            has_ended = trainer.status() is not None
            await self._follow(job, events, known)
            if not has_ended:
                await asyncio.sleep(POLL_SECONDS)
        self._trainer = None
        await self._finish(job, trainer, events)

    async def _follow(self, job: JobRecord, events: EventLog, known: set[int]) -> None:
        # In this order: the trainer writes a step's figures before its checkpoint, so each one found has its own.
        found = await asyncio.to_thread(_checkpoints_in, self._jobs.output(job.id))
        await asyncio.to_thread(events.collect)
        for step, path in found:
            if step not in known and not job.has_ended:
                known.add(step)
                await self._serve_checkpoint(job, step, path, events)

    async def _serve_checkpoint(self, job: JobRecord, step: int, path: Path, events: EventLog) -> None:
        """Serves the checkpoint's adapter by a name, and unloads the oldest one beyond CHECKPOINTS_KEPT."""
        name = checkpoint_name(job.result, step)
        try:
            await self._adapters.load(name, str(path), take_over=True)
        except KtError as error:  # the trainer may have removed it meanwhile
            logger.warning("fine-tuning job %s: checkpoint %d is not served: %s", job.id, step, error)
            return
        metrics = await asyncio.to_thread(events.at_step, step)
        made = CheckpointRecord(
            id=new_id("ftckpt_"), step=step, model=name, created_at=int(time.time()), metrics={**metrics, "step": step}
        )
        job.checkpoints = sorted([*job.checkpoints, made], key=lambda one: one.step)
        dropped, job.checkpoints = job.checkpoints[:-CHECKPOINTS_KEPT], job.checkpoints[-CHECKPOINTS_KEPT:]
        await self._save(job, job.status)
        await asyncio.to_thread(events.note, f"Checkpoint created at step {step}: {name}")
        for old in dropped:
            with contextlib.suppress(KtError):
                await self._adapters.unload(old.model)

    async def _finish(self, job: JobRecord, trainer: Trainer, events: EventLog) -> None:
        if trainer.status() != 0:
            await self._free(job)
            reason = await asyncio.to_thread(trainer.reason)
            if not job.has_ended:
                message = self._without_paths(job, reason)
                await self._fail(job, JobError(code="training_failed", message=message))
        elif not job.has_ended:
            await self._succeed(job, events)
        await asyncio.to_thread(_remove_checkpoints, self._jobs.output(job.id))

    async def _succeed(self, job: JobRecord, events: EventLog) -> None:
        figures = [event["data"] for event in await asyncio.to_thread(events.read) if event["data"]]
        job.trained_tokens = max((int(each.get("total_tokens", 0)) for each in figures), default=0)
        await self._note(job, f"New fine-tuned model created: {job.result}")
        await self._end(job, "succeeded", "The job has successfully completed")

    def _without_paths(self, job: JobRecord, text: str) -> str:
        """The trainer's message for a client: names in place of the server's paths."""
        place = self._jobs.place(job.id)
        named = {
            str(place / "data" / "train.jsonl"): job.training_file,
            str(place / "data" / "valid.jsonl"): job.validation_file or "",
            f"{self._jobs.output(job.id)}/": "",
            f"{place}/": "",
        }
        for path, name in named.items():
            text = text.replace(path, name)
        return text

    async def _free(self, job: JobRecord) -> None:
        """What a trainer that was killed has left in the server: its session, and the name of its rollouts."""
        with contextlib.suppress(KtError):
            status = await self._adapters.status()
            for session in [one["session"] for one in status["sessions"]]:
                if session.startswith(f"{job.id}-"):
                    request = messages.CloseSession(request_id=f"finetuning-{secrets.token_hex(8)}", session=session)
                    await self._resident.call(request, replies.DoneReply, CLOSE_SECONDS)
            for name in list(status["adapters"]):
                if name.startswith(f"{ROLLOUTS}{job.id}-"):
                    await self._adapters.unload(name)

    # States.

    async def _fail(self, job: JobRecord, error: JobError) -> None:
        if not job.has_ended:
            job.error = error
            await self._end(job, "failed", f"The job failed: {error.message}", "error")

    async def _end(self, job: JobRecord, status: Status, message: str, level: Level = "info") -> None:
        """Writes the event before the state: a client that sees the state finds the event."""
        job.finished_at = int(time.time())
        await self._note(job, message, level)
        await self._save(job, status)
        self._logs.pop(job.id, None)

    async def _save(self, job: JobRecord, status: Status) -> None:
        """Keeps the status of a job that has ended. A failure to write the record is logged; the job continues."""
        if not job.has_ended:
            job.status = status
        try:
            await self._written(self._jobs.save, job)
        except (KtError, OSError) as error:
            logger.error("fine-tuning job %s: its record was not written: %s", job.id, error)

    async def _note(self, job: JobRecord, message: str, level: Level = "info") -> None:
        try:
            await self._written(lambda: self.events(job).note(message, level))
        except OSError as error:
            logger.error("fine-tuning job %s: an event was not written: %s", job.id, error)

    async def _written(self, write: Callable[..., None], *given: Any) -> None:
        """Calls `write` on a thread, and to its end though the caller is cancelled: clients see a state as soon as it
        is set, and the next server must find it."""
        task = asyncio.create_task(asyncio.to_thread(write, *given))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        await asyncio.shield(task)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _checkpoints_in(output: Path) -> list[tuple[int, Path]]:
    """(step, directory) of each complete checkpoint, the oldest first."""
    found = []
    for path in output.glob(f"{PREFIX}*"):
        number = path.name.removeprefix(PREFIX)
        if number.isdecimal() and (path / STATE_FILE).is_file():
            found.append((int(number), path))
    return sorted(found)


def _remove_checkpoints(output: Path) -> None:
    """For a job that has ended: nothing resumes from its checkpoints, and the server has copied their adapters."""
    for _, path in _checkpoints_in(output):
        shutil.rmtree(path, ignore_errors=True)


def _unexpected(error: Exception) -> str:
    return f"unexpected {type(error).__name__}; the server's log has it"
