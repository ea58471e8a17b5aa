"""A publisher over a fake engine, for tests that say when each of its steps ends."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

from reference.lora import write_adapter

from kt_runtime.adapters import VersionStore
from kt_runtime.resident.publishing.probe import Probe
from kt_runtime.resident.publishing.publisher import Publisher
from kt_runtime.resident.scheduler import TrainingScheduler, run_at_once
from kt_runtime.resident.training import checkpoint
from kt_runtime.resident.training.session import SessionId
from kt_runtime.resident.workers import Workers


class Desk:
    """A publisher over a fake engine; whatever it has begun continues when `settle` or `settle_once` is called."""

    def __init__(self, lab: Any, root: Path, salt: str = "salt") -> None:
        self.lab, self.host = lab, lab.host
        self.store = VersionStore(root, lab.twin.family, lab.host.config, lab.host.max_lora_rank, 3)
        self.scheduler = TrainingScheduler(1.0)
        self.ended: queue.Queue[tuple[str, Exception | None]] = queue.Queue()
        self.answers: list[tuple[str, Exception | None]] = []
        self.outcomes: list[Any] = []  # an AdapterVersion each, or the exception
        self.workers = Workers("kt-prepare", lambda *ended: self.ended.put(ended))
        self.publisher = Publisher(
            lab.host,
            lab.twin.family,
            self.store,
            3,
            Probe(lab.twin, lab.lora, lab.host.config),
            self.scheduler.submit,
            self.workers,
            lambda *answer: self.answers.append(answer),
        )
        self.publisher.start(salt, self.store.scan()[0])

    def adapter(self, seed: int) -> Any:
        session = self.lab.session(["attention"], seed=seed)
        adapter = run_at_once(checkpoint.copied_masters(session))
        session.close()
        return adapter

    def publish(self, name: str, seed: int, **who: Any) -> None:
        self.publisher.publish(name, self.adapter(seed), f"seed {seed}", self.outcomes.append, **who)

    def session(self, name: str) -> SessionId:
        opened = SessionId(f"key of {name}", name)
        self.publisher.owners.begin(opened)
        return opened

    def info(self, name: str) -> Any:
        return {info.name: info for info in self.publisher.adapters()}[name]

    def loaded(self, name: str, adapter: Any, path: Path) -> Any:
        write_adapter(path, adapter)
        self.publisher.load(name, str(path), self.outcomes.append)
        self.settle()
        return self.outcomes[-1]

    @property
    def is_busy(self) -> bool:
        return bool(self.publisher._queues)

    def prepared(self) -> None:
        """One adapter has been read, checked and converted, and its probe has run: the frontend is asked, or nobody."""
        self.publisher.probe(*self.ended.get(timeout=60))
        while not self.scheduler.is_idle:
            self.scheduler.run_slice(is_serving=False)

    def moved(self) -> None:
        """The frontend answers what it was asked."""
        self.host.poll()
        answers, self.answers = self.answers, []
        for lora_id, error in answers:
            self.publisher.finish(lora_id, error)

    def settle(self) -> None:
        """Until nothing is left."""
        while self.is_busy:
            if self.host.moves:
                self.moved()
            else:
                self.prepared()

    def written(self) -> None:
        assert self.publisher._persistence.flush(60)

    def current(self, name: str) -> str | None:
        return {info.name: info.current for info in self.publisher.adapters()}[name]

    def forget(self, name: str) -> list[Any]:
        told: list[Any] = []
        self.publisher.forget(name, told.append)
        return told
