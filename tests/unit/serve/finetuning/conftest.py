"""The fine-tuning API with its real routes and middleware, over trainers that the test plays and adapters in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from kt_runtime.serve.finetuning import queue as queue_module
from kt_runtime.serve.finetuning.directory import claimed_finetuning
from kt_runtime.serve.finetuning.events import LOG_FILE
from kt_runtime.serve.finetuning.files import FileStore
from kt_runtime.serve.finetuning.jobs import JobStore
from kt_runtime.serve.finetuning.queue import JobQueue
from kt_runtime.serve.finetuning.recipe import ServerFacts
from kt_runtime.serve.finetuning.routes import finetuning_routes
from kt_runtime.serve.finetuning.service import FineTuning
from kt_runtime.serve.finetuning.trainer import Connection
from kt_runtime.serve.http.route_table import rule_for
from kt_runtime.serve.requests.checks.middleware import RequestMiddleware
from kt_runtime.serve.requests.checks.served import ServedModels
from kt_runtime.wire import replies
from kt_runtime.wire.codec import Arrays
from kt_runtime.wire.messages import AnyRequest, CloseSession

_R = TypeVar("_R", bound=replies.Reply)

PATIENCE_S = 600.0  # hundreds of fsync, on a disk that others keep busy
ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@dataclass
class PlayedTrainer:
    """`exit_status` None: it runs."""

    place: Path
    connection: Connection
    exit_status: int | None = None
    was_killed: bool = False

    @property
    def output(self) -> Path:
        return Path(json.loads((self.place / "recipe.json").read_text())["output_dir"])

    def trains(self, step: int) -> None:
        self.output.mkdir(exist_ok=True)
        with (self.output / LOG_FILE).open("a") as file:
            file.write(
                json.dumps({"current_steps": step, "total_steps": 9, "loss": 1 / step, "total_tokens": 5 * step}) + "\n"
            )

    def saves(self, step: int) -> None:
        place = self.output / f"checkpoint-{step}"
        place.mkdir(parents=True)
        (place / "trainer_state.json").write_text("{}")

    def status(self) -> int | None:
        return self.exit_status

    async def stop(self) -> None:
        self.exit_status = 130

    def kill(self) -> None:
        self.was_killed, self.exit_status = True, -9

    def reason(self) -> str:
        return f"{self.place / 'data' / 'train.jsonl'}:3: is wrong ({self.output}/x)"


@dataclass
class MemoryAdapters:
    served: dict[str, str] = field(default_factory=dict)
    sessions: list[str] = field(default_factory=list)

    async def status(self) -> dict[str, Any]:
        return {"sessions": [{"session": name} for name in self.sessions], "adapters": self.served, "restoring": []}

    async def list_all(self) -> list[dict[str, Any]]:
        return [{"name": name, "current": version} for name, version in self.served.items()]

    async def load(self, name: str, path: str, *, take_over: bool = False) -> dict[str, Any]:
        assert Path(path).is_dir()
        self.served[name] = path
        return {}

    async def unload(self, name: str) -> dict[str, Any]:
        del self.served[name]
        return {}


@dataclass
class MemoryResident:
    """Of an `AsyncResident`: closes sessions."""

    closed: list[str] = field(default_factory=list)

    async def call(self, request: AnyRequest, reply_type: type[_R], timeout_s: float) -> _R:
        assert isinstance(request, CloseSession)
        self.closed.append(request.session)
        reply = replies.DoneReply(request_id=request.request_id)
        assert isinstance(reply, reply_type)
        return reply

    async def exchange(
        self, request: AnyRequest, reply_type: type[_R], timeout_s: float, arrays: Arrays | None = None
    ) -> tuple[_R, dict[str, np.ndarray]]:
        return await self.call(request, reply_type, timeout_s), {}


class Desk:
    """Servers one after the other over one directory: each `run` is one. `trainers`: all that were started."""

    def __init__(self, place: Path, trainers: list[PlayedTrainer]) -> None:
        self.place, self.trainers = place, trainers
        self.adapters, self.resident = MemoryAdapters(), MemoryResident()

    def run(self, scenario: Callable[[Desk], Awaitable[None]]) -> None:
        asyncio.run(self._serve(scenario))

    async def _serve(self, scenario: Callable[[Desk], Awaitable[None]]) -> None:
        with claimed_finetuning(None, self.place, pytest.fail) as root:
            assert root is not None
            self.files, self.jobs = FileStore(root / "files"), JobStore(root)
            models = ServedModels("tiny")
            models.adapters = lambda: self.adapters.served
            facts, ready = ServerFacts(Path("/models/tiny"), 16, 512), asyncio.sleep
            queue = JobQueue(
                self.jobs,
                self.files,
                self.adapters,
                self.resident,
                facts,
                self.place,
                Connection("http://here", "the key of trainers"),
                lambda: ready(0),
            )
            app = FastAPI()
            app.include_router(finetuning_routes(FineTuning(self.files, self.jobs, queue, models)))
            self.queue = queue
            queue.start()
            app.add_middleware(RequestMiddleware, fields_of=rule_for, max_body_bytes=1 << 20, checks=[])
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here/v1/") as self.http:
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await scenario(self)
                finally:
                    await queue.close()

    async def ask(self, method: str, path: str, status: int = 200, **named: Any) -> Any:
        answer = await self.http.request(method, path, **named)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def upload(self, *rows: Any, status: int = 200, purpose: str = "fine-tune") -> Any:
        content = "".join(json.dumps(row) + "\n" for row in rows or (ROW,)).encode()
        return await self.ask(
            "POST", "files", status, data={"purpose": purpose}, files={"file": ("rows.jsonl", content)}
        )

    async def create(self, file_id: str | None = None, status: int = 200, **fields: Any) -> Any:
        file_id = file_id or (await self.upload())["id"]
        body = {"model": "tiny", "training_file": file_id, **fields}
        return await self.ask("POST", "fine_tuning/jobs", status, json=body)

    async def job(self, job: Any) -> Any:
        return await self.ask("GET", f"fine_tuning/jobs/{job['id']}")

    async def wait(self, job: Any, status: str) -> Any:
        while (found := await self.job(job))["status"] != status:
            assert found["status"] not in ("failed", "succeeded", "cancelled"), found
            await asyncio.sleep(0.01)
        return found

    async def trainer(self, number: int) -> PlayedTrainer:
        while len(self.trainers) <= number:
            await asyncio.sleep(0.01)
        return self.trainers[number]

    async def messages(self, job: Any) -> list[str]:
        """The oldest first."""
        page = await self.ask("GET", f"fine_tuning/jobs/{job['id']}/events", params={"limit": 100})
        return [event["message"] for event in reversed(page["data"])]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    trainers: list[PlayedTrainer] = []

    def start(place: Path, connection: Connection) -> PlayedTrainer:
        trainers.append(PlayedTrainer(place, connection))
        return trainers[-1]

    monkeypatch.setattr(queue_module, "Trainer", start)
    monkeypatch.setattr(queue_module, "POLL_SECONDS", 0.01)
    return Desk(tmp_path, trainers)
