"""The Tinker API as one object: a method per endpoint, over the resident, SGLang's engine and the adapter store.

A client's session owns runs (one adapter in training each) and samplers. It ends when the client finishes it or has
gone: its runs are closed and its unnamed samplers released. Checkpoints stay.

Names in the adapter store: a run's latest unnamed weights are adapter SESSION.train.N while the session lives; weights
saved under a name are adapter NAME, or NAME-SESSION.train.N if another adapter has the name. Each unnamed sampler is
pinned to its version: the run's later versions don't change it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

from kt_runtime.errors import ConflictError, InvalidValueError, KtError, NotFoundError
from kt_runtime.serve.tinker.checkpoints import (
    CheckpointPath,
    CheckpointRecord,
    Checkpoints,
    RunRecord,
    adapter_of,
    checked_name,
    size_of,
)
from kt_runtime.serve.tinker.futures import ENDED, Failure, Future, Futures
from kt_runtime.serve.tinker.listing import Listing
from kt_runtime.serve.tinker.model import ModelFacts
from kt_runtime.serve.tinker.protocol import bodies
from kt_runtime.serve.tinker.protocol.batches import TrainingCall
from kt_runtime.serve.tinker.protocol.results import JsonResult, Result
from kt_runtime.serve.tinker.runs import TrainingRun
from kt_runtime.serve.tinker.samplers import Adapters, Sampler, Samplers, sampler_id_of
from kt_runtime.serve.tinker.sampling import Engine
from kt_runtime.serve.tinker.sessions import HEARTBEAT_SECONDS, ClientSessions
from kt_runtime.serve.tinker.training import Training, new_id
from kt_runtime.wire.async_client import AsyncResident

logger = logging.getLogger(__name__)

ALPHA = 32.0
"""The API has no alpha. Tinker's cookbook assumes 32 for every rank; `user_metadata` may have another `lora_alpha`."""
PINNED_OF_RUN = 8
SERVED_OF_RUN = 32
"""Named weights of a run that are served at once; an older one is loaded again when a client samples its path."""


class TinkerService:
    """Belongs to the HTTP server's event loop. `reserved`: names that no adapter may have."""

    def __init__(
        self,
        resident: AsyncResident,
        engine: Engine,
        adapters: Adapters,
        model: ModelFacts,
        adapter_directory: Path,
        *,
        reserved: Collection[str] = (),
        lost_after_s: float = 120.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resident, self._engine, self._adapters, self.model = resident, engine, adapters, model
        self._adapter_directory = adapter_directory
        self.futures = Futures()
        self.sessions = ClientSessions(lost_after_s=lost_after_s, now=now)
        self._checkpoints = Checkpoints(adapter_directory)
        self._runs: dict[str, TrainingRun] = {}
        self.samplers = Samplers(engine, adapters, model, self._checkpoints, self.futures, self.sessions, reserved)
        self.listing = Listing(self._checkpoints, self._runs, adapters)
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause_s = min(HEARTBEAT_SECONDS, lost_after_s / 4)

    async def watch(self) -> None:
        """Ends sessions of clients that have gone, until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            for session in self.sessions.lost():
                logger.info("Tinker session %s: its client has gone", session)
                self.finish_session(session)

    async def close(self) -> None:
        """Called at the server's end; the resident ends too, so nothing is freed there."""
        for run in self._runs.values():
            run.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.samplers.close()

    # Sessions.

    def create_session(self, attempt: str | None) -> dict[str, Any]:
        return {
            "type": "create_session",
            "session_id": self.sessions.create(attempt),
            "info_message": f"kt-runtime serves and trains {self.model.name}. Embedding and unembedding are never "
            "adapted: train_unembed has no effect.",
        }

    def finish_session(self, session: str) -> None:
        """Frees what the session owns, in the background. An unknown session is ignored."""
        if self.sessions.end(session):
            self._background(self._free(session))

    async def _free(self, session: str) -> None:
        await self.samplers.free(session)
        for run in [run for run in self._runs.values() if run.owner == session]:
            await self._end_run(run)
        self.futures.end_owner(session, ENDED)

    async def _end_run(self, run: TrainingRun) -> None:
        self._runs.pop(run.run_id, None)
        await run.end(ENDED)
        for alias in run.pinned:
            self._engine.unpin(alias)
        if run.publishes_latest:
            name = adapter_of(run.run_id)
            with contextlib.suppress(KtError):
                await self._adapters.unload(name)
                await asyncio.to_thread(shutil.rmtree, self._adapter_directory / name, True)

    # Models.

    def create_model(self, body: bodies.CreateModel) -> Future:
        def record() -> RunRecord:
            lora = body.lora_config
            if lora is None:
                raise InvalidValueError("lora_config is missing: this server trains LoRA adapters only")
            kind = (body.optimizer_config or {}).get("type", "adamw")
            if kind != "adamw":
                raise InvalidValueError(f"optimizer {kind!r}: this server has adamw only")
            self.model.check(body.base_model)
            return RunRecord(
                run_id=_run_id(body.session_id, body.model_seq_id),
                base_model=body.base_model,
                rank=lora.rank,
                alpha=_alpha(body.user_metadata),
                targets=self.model.targets(attention=lora.train_attn, mlp=lora.train_mlp),
                train_attn=lora.train_attn,
                train_mlp=lora.train_mlp,
                seed=secrets.randbits(31) if lora.seed is None else lora.seed,
                created_at=time.time(),
                user_metadata=_texts(body.user_metadata),
            )

        async def open_run(run: TrainingRun) -> Result:
            await run.training.open(run.record)
            return JsonResult({"type": "create_model", "model_id": run.run_id})

        return self._new_run(body.session_id, body.model_seq_id, record, open_run)

    def load_new_run(self, body: bodies.LoadWeights) -> Future:
        """A run that begins with a training checkpoint."""
        session, number = body.session_id or "", body.model_seq_id or 0

        def record() -> RunRecord:
            if body.base_model is not None:
                self.model.check(body.base_model)
            _, parent = self._training_checkpoint(body.path)
            return RunRecord(
                run_id=_run_id(session, number),
                base_model=parent.base_model,
                rank=parent.rank,
                alpha=parent.alpha,
                targets=parent.targets,
                train_attn=parent.train_attn,
                train_mlp=parent.train_mlp,
                seed=parent.seed,
                created_at=time.time(),
                user_metadata=_texts(body.user_metadata),
            )

        async def open_run(run: TrainingRun) -> Result:
            await self._open_from(run, body.path, optimizer=body.optimizer)
            return JsonResult({"type": "load_weights", "path": body.path, "model_id": run.run_id})

        return self._new_run(session, number, record, open_run)

    def _new_run(
        self,
        session: str,
        number: int,
        record: Callable[[], RunRecord],
        open_run: Callable[[TrainingRun], Coroutine[Any, Any, Result]],
    ) -> Future:
        """`record` is called at once, `open_run(run)` in the background. Errors of both end the future."""
        self.sessions.touch(session)
        key = ("run", _run_id(session, number))
        if (known := self.futures.known(key)) is not None:
            return known
        future = self.futures.open(key, session)
        try:
            checked = record()
        except KtError as error:
            self.futures.finish(future, Failure.of(error))
            return future
        training = Training(self._resident, adapter_of(checked.run_id), self.model.context_tokens)
        run = TrainingRun(checked, session, training, self.futures)
        self._runs[run.run_id] = run
        run.start(open_run(run), future, lambda: self._forget(run))
        future.facts["model_id"] = run.run_id
        return future

    def _forget(self, run: TrainingRun) -> None:
        del self._runs[run.run_id]

    async def _open_from(self, run: TrainingRun, path: str, *, optimizer: bool) -> None:
        """Without `optimizer` the run begins like a new one, with the checkpoint's weights."""
        directory = self._checkpoints.directory(self._training_checkpoint(path)[0])
        await run.training.open(run.record, directory)
        if optimizer:
            await run.training.restore(directory)

    def _training_checkpoint(self, path: str) -> tuple[CheckpointPath, RunRecord]:
        parsed = CheckpointPath.parse(path)
        if parsed.kind != "weights":
            raise InvalidValueError(f"{path}: weights for sampling; training starts from what save_state saved")
        self._checkpoints.find(parsed)
        record = self._checkpoints.run(parsed.run_id)
        if record is None:
            raise NotFoundError(f"{path}: its training run is not recorded on this server")
        return parsed, record

    def run(self, run_id: str) -> TrainingRun:
        """Raises NotFoundError for a run that is not in training."""
        run = self._runs.get(run_id)
        if run is None:
            raise NotFoundError(
                f"model {run_id[:100]!r} is not in training: its session has ended, or the server was restarted; "
                "continue from a checkpoint with create_training_client_from_state"
            )
        self.sessions.touch(run.owner)
        return run

    def info(self, run_id: str) -> dict[str, Any]:
        record = self.run(run_id).record
        return {
            "type": "get_info",
            "model_id": run_id,
            "model_name": record.base_model,
            "model_data": {
                "arch": self.model.family.name,
                "model_name": record.base_model,
                "tokenizer_id": str(self.model.directory),
            },
            "is_lora": True,
            "lora_rank": record.rank,
            "optimizer_config": {"type": "adamw"},
        }

    def unload_model(self, run_id: str) -> Future:
        run = self.run(run_id)
        future = self.futures.open(("unload", run_id, new_id()), run.owner)

        async def unload() -> None:
            await self._end_run(run)
            self.futures.finish(future, JsonResult({"type": "unload_model", "model_id": run_id}))

        self._background(unload())
        return future

    # Calls of a run, in the order of their seq_id.

    def forward(self, call: TrainingCall) -> Future:
        run = self.run(call.model_id)
        return run.submit(call.seq_id, call.num_bytes, lambda: run.training.forward(call))

    def optim_step(self, body: bodies.OptimStep) -> Future:
        run = self.run(body.model_id)
        return run.submit(body.seq_id, 0, lambda: run.training.optim_step(body))

    def load_into_run(self, body: bodies.LoadWeights) -> Future:
        run = self.run(body.model_id or "")

        async def load() -> Result:
            _, saved = self._training_checkpoint(body.path)
            now = run.record
            if (saved.rank, saved.alpha, saved.targets) != (now.rank, now.alpha, now.targets):
                raise ConflictError(
                    f"{body.path}: rank {saved.rank}, alpha {saved.alpha:g}, targets {saved.targets}; this run has "
                    f"{now.rank}, {now.alpha:g}, {now.targets}"
                )
            await run.training.close()
            await self._open_from(run, body.path, optimizer=body.optimizer)
            return JsonResult({"type": "load_weights", "path": body.path, "model_id": run.run_id})

        return run.submit(body.seq_id, 0, load)

    def save_weights(self, body: bodies.SaveWeights) -> Future:
        run = self.run(body.model_id)

        async def save() -> Result:
            path = CheckpointPath(run.run_id, "weights", _name(body.path))
            if not body.overwrite:
                await asyncio.to_thread(self._checkpoints.check_free, path)
            await asyncio.to_thread(self._checkpoints.begin, run.record)
            place = self._checkpoints.directory(path)
            saved = await run.training.save(place, replace=True)
            record = CheckpointRecord(
                run_id=run.run_id,
                kind="weights",
                name=path.name,
                created_at=time.time(),
                version=saved.content_hash,
                size_bytes=await asyncio.to_thread(size_of, place),
                user_metadata=_texts(body.user_metadata),
            )
            await asyncio.to_thread(self._checkpoints.add, record)
            return JsonResult({"type": "save_weights", "path": str(path)})

        return run.submit(body.seq_id, 0, save)

    def refuse_call(self, model_id: str, seq_id: int | None, reason: str) -> Future:
        """The call takes its place in the order and ends with `reason`."""
        run = self.run(model_id)

        async def refuse() -> Result:
            raise InvalidValueError(reason)

        return run.submit(seq_id, 0, refuse)

    def save_for_sampler(self, body: bodies.SaveWeightsForSampler) -> Future:
        run = self.run(body.model_id)
        if body.sampling_session_seq_id is None:
            return run.submit(body.seq_id, 0, lambda: self._save_named(run, body))
        return run.submit(body.seq_id, 0, lambda: self._save_unnamed(run, body))

    async def _save_named(self, run: TrainingRun, body: bodies.SaveWeightsForSampler) -> Result:
        path = CheckpointPath(run.run_id, "sampler_weights", _name(body.path))
        async with self.samplers.naming:  # two runs must not find the same name free
            name = await self.samplers.adapter_name(path)
            reply = await run.training.publish(name)
        self.samplers.versions[reply.lora_id] = reply.version
        record = CheckpointRecord(
            run_id=run.run_id,
            kind="sampler_weights",
            name=path.name,
            created_at=time.time(),
            version=reply.version,
            adapter=name,
            user_metadata=_texts(body.user_metadata),
        )
        await asyncio.to_thread(self._checkpoints.begin, run.record)
        await asyncio.to_thread(self._checkpoints.add, record)
        await self._serve_newest(run, name)
        return JsonResult({"type": "save_weights_for_sampler", "path": str(path)})

    async def _serve_newest(self, run: TrainingRun, name: str) -> None:
        """A recipe may save at every step, for hours: each served version takes memory."""
        run.named[:] = [*(other for other in run.named if other != name), name]
        if len(run.named) > SERVED_OF_RUN:
            with contextlib.suppress(KtError):
                await self._adapters.unload(run.named.pop(0))

    async def _save_unnamed(self, run: TrainingRun, body: bodies.SaveWeightsForSampler) -> Result:
        assert body.sampling_session_seq_id is not None
        sampler_id = sampler_id_of(run.owner, body.sampling_session_seq_id)
        name = adapter_of(run.run_id)
        reply = await run.training.publish(name)
        run.publishes_latest = True
        self.samplers.versions[reply.lora_id] = reply.version
        adapter = name
        if body.kind == "snapshot":
            adapter = f"tinker:{sampler_id}"
            self._engine.pin(adapter, name)
            run.pinned.append(adapter)
            if len(run.pinned) > PINNED_OF_RUN:
                self._engine.unpin(run.pinned.pop(0))
        self.samplers.add(Sampler(sampler_id, run.owner, run.record.base_model, adapter))
        return JsonResult({"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _run_id(session: str, number: int) -> str:
    return f"{session}:train:{number}"


def _name(given: str | None) -> str:
    return checked_name(given) if given is not None else f"{time.time():.0f}-{secrets.token_hex(2)}"


def _alpha(metadata: Mapping[str, Any] | None) -> float:
    given = (metadata or {}).get("lora_alpha")
    if given is None:
        return ALPHA
    try:
        return float(given)
    except (TypeError, ValueError):
        raise InvalidValueError(f"user_metadata: lora_alpha is {given!r}; it must be a number") from None


def _texts(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    return {str(name): str(value) for name, value in (metadata or {}).items()}
