"""What clients sample from: the base, an adapter by name, a checkpoint by path, or a run's weights of one moment.

A weight set that a client saved under a name is the adapter of that name; if another adapter has it, the run's name is
appended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from kt_runtime.errors import ConflictError, InvalidValueError, NotFoundError, ServerBusyError, UnknownNameError
from kt_runtime.serve.tinker import sampling
from kt_runtime.serve.tinker.checkpoints import SCHEME, CheckpointPath, Checkpoints, adapter_of, checked_name
from kt_runtime.serve.tinker.futures import ENDED, Future, Futures
from kt_runtime.serve.tinker.model import ModelFacts
from kt_runtime.serve.tinker.protocol import bodies
from kt_runtime.serve.tinker.protocol.results import Result
from kt_runtime.serve.tinker.runs import outcome_of
from kt_runtime.serve.tinker.sampling import Engine
from kt_runtime.serve.tinker.sessions import ClientSessions
from kt_runtime.serve.tinker.training import new_id

MAX_OPEN = 4096


class Adapters(Protocol):
    """The server's adapters by name: `serve.http.adapters.Adapters`."""

    async def list_all(self) -> list[dict[str, Any]]: ...

    async def load(self, name: str, path: str, *, take_over: bool = False) -> dict[str, Any]: ...

    async def unload(self, name: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Sampler:
    """`adapter`: an adapter's name or a pinned alias, None: the base. `model_path`: as the client named it."""

    sampler_id: str
    owner: str
    base_model: str
    adapter: str | None
    model_path: str | None = None


class Samplers:
    """`reserved`: names that no adapter may have. `naming`: held while a free name is looked for and taken."""

    def __init__(
        self,
        engine: Engine,
        adapters: Adapters,
        model: ModelFacts,
        checkpoints: Checkpoints,
        futures: Futures,
        sessions: ClientSessions,
        reserved: Collection[str] = (),
    ) -> None:
        self._engine, self._adapters, self._model = engine, adapters, model
        self._checkpoints, self._futures, self._sessions = checkpoints, futures, sessions
        self._reserved = reserved
        self.naming = asyncio.Lock()
        self.versions: dict[str, str] = {}
        """Versions of serving copies: lora_id -> the version's hash."""
        self._samplers: dict[str, Sampler] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def add(self, sampler: Sampler) -> None:
        self._samplers[sampler.sampler_id] = sampler

    async def free(self, owner: str) -> None:
        """Ends the owner's samples in progress and forgets its samplers."""
        for sampler in [one for one in self._samplers.values() if one.owner == owner]:
            del self._samplers[sampler.sampler_id]
        await self._cancel([task for place, task in self._running.items() if place.startswith(f"{owner}/")])

    async def close(self) -> None:
        await self._cancel(list(self._running.values()))

    @staticmethod
    async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create_sampler(self, body: bodies.CreateSamplingSession) -> dict[str, Any]:
        self._sessions.touch(body.session_id)
        sampler_id = sampler_id_of(body.session_id, body.sampling_session_seq_id)
        if sampler_id not in self._samplers:
            adapter = await self._asked_adapter(body.base_model, body.model_path)
            base = self._model.name if body.model_path is None else str(self._model.directory)
            self._samplers[sampler_id] = Sampler(sampler_id, body.session_id, base, adapter, body.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def _asked_adapter(self, base_model: str | None, model_path: str | None) -> str | None:
        """The adapter that a client named, None for the base. Raises NotFoundError, UnknownNameError, ..."""
        if model_path is None:
            if base_model is None:
                raise InvalidValueError("neither base_model nor model_path says what to sample from")
            if base_model in self._model.names:
                return None
            name = base_model.removeprefix(f"{self._model.name}:")
            served = await self._served()
            if name not in served and self._model.any_name:
                return None
            if name not in served:
                raise UnknownNameError("model or adapter", base_model, [*self._model.names, *served])
            return name
        plain = model_path.removeprefix(SCHEME)
        if "/" not in plain:
            served = await self._served()
            if plain not in served:
                raise UnknownNameError("adapter", plain, served)
            return plain
        return await self._adapter_of_checkpoint(CheckpointPath.parse(model_path))

    async def _adapter_of_checkpoint(self, path: CheckpointPath) -> str:
        record = await asyncio.to_thread(self._checkpoints.find, path)
        served = await self._served()
        if record.adapter is not None and served.get(record.adapter) == record.version:
            return record.adapter
        place = self._checkpoints.directory(path)
        if path.kind == "sampler_weights":
            if record.adapter is None or record.adapter in served:
                raise ConflictError(
                    f"{path}: adapter {record.adapter!r} now has another version than {record.version[:16]}; "
                    "`kt-runtime adapter rollback` brings a version back"
                )
            place = self._checkpoints.version_directory(record.adapter, record.version)
        async with self.naming:
            name = await self.adapter_name(path)
            answer = await self._adapters.load(name, str(place))
        record.adapter, record.version = name, answer["version"]
        await asyncio.to_thread(self._checkpoints.add, record)
        return name

    async def _served(self) -> dict[str, str]:
        """Served adapters and their current versions."""
        found = {}
        for adapter in await self._adapters.list_all():
            for version in adapter["versions"]:
                if version["lora_id"]:
                    self.versions[version["lora_id"]] = version["version"]
            if adapter["current"]:
                found[adapter["name"]] = adapter["current"]
        return found

    def sampler(self, sampler_id: str) -> dict[str, Any]:
        sampler = self._sampler(sampler_id)
        return {"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}

    def _sampler(self, sampler_id: str) -> Sampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise NotFoundError(
                f"sampler {sampler_id[:100]!r} is not known: its session has ended, or the server was restarted"
            )
        self._sessions.touch(sampler.owner)
        return sampler

    def sample(self, body: bodies.Sample) -> Future:
        """Raises InvalidValueError, NotFoundError, ServerBusyError: sampling has no order that an error could break."""
        if body.sampling_session_id is None:
            raise InvalidValueError("sampling_session_id is missing; create_sampling_session gives one")
        sampler = self._sampler(body.sampling_session_id)
        key = ("sample", sampler.sampler_id, body.seq_id if body.seq_id is not None else new_id())
        if (known := self._futures.known(key)) is not None:
            return known
        sampling.check(body)
        if len(self._running) >= MAX_OPEN:
            raise ServerBusyError(f"{MAX_OPEN} samples are in progress, which is the limit; try again later")
        future = self._futures.open(key, sampler.owner)
        future.facts["sample_sequence_ids"] = [f"{future.request_id}-{index}" for index in range(body.num_samples)]
        place = f"{sampler.owner}/{future.request_id}"
        self._running[place] = task = asyncio.create_task(self._run_sample(future, sampler, body))
        task.add_done_callback(lambda _: self._running.pop(place, None))
        return future

    async def _run_sample(self, future: Future, sampler: Sampler, body: bodies.Sample) -> None:
        async def work() -> Result:
            return await sampling.sample(
                self._engine, body, sampler.adapter, future.request_id, self._model.context_tokens, self.versions
            )

        try:
            self._futures.finish(future, await outcome_of(work(), "a sample"))
        finally:
            self._futures.finish(future, ENDED)

    async def adapter_name(self, path: CheckpointPath) -> str:
        """The adapter's name for a checkpoint: the one it has, else its own name if free, else that with the run's."""
        with contextlib.suppress(NotFoundError):
            saved = await asyncio.to_thread(self._checkpoints.find, path)
            if saved.adapter is not None:
                return saved.adapter
        taken = {adapter["name"] for adapter in await self._adapters.list_all()} | set(self._reserved)
        return path.name if path.name not in taken else checked_name(f"{path.name}-{adapter_of(path.run_id)}")


def sampler_id_of(session: str, number: int) -> str:
    return f"{session}:sample:{number}"
