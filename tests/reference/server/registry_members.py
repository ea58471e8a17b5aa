"""Replicas of one real registry, each with a server that keeps names in memory and versions in real directories."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kt_runtime.errors import AdapterError, KtError, UnknownNameError
from kt_runtime.registry import Registry, open_place
from kt_runtime.registry.place import Place
from kt_runtime.serve.registry.replica import About, Replica
from kt_runtime.serve.registry.report import NameReport, RegistryReport
from kt_runtime.serve.registry.state import StateFile

WEIGHTS = "a" * 64


def eventually(condition: Callable[[], Any], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def version_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Server:
    """In place of `ThisServer`. A version is a directory with one file; its hash is that of the file.

    `refuses`: the error of every `follow`. `names`: as requests would find them; a restart keeps them.
    """

    def __init__(self, root: Path) -> None:
        self.adapters = root / "adapters"
        self.adapters.mkdir(parents=True, exist_ok=True)
        self.names: dict[str, str] = {}
        self.weights = WEIGHTS
        self.refuses: KtError | None = None
        self.not_stored: str | None = None
        self.followed: list[str] = []
        self.while_following: Callable[[], None] = lambda: None
        self.replica: Replica | None = None

    def publish(self, name: str, text: str, *, stores: bool = True) -> str:
        """As a session of this server would."""
        version = version_of(text)
        if stores:
            self.store(name, text)
        self._move(name, version)
        return version

    def store(self, name: str, text: str) -> None:
        directory = self.adapters / name / version_of(text)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "weights").write_text(text)

    def remove(self, name: str) -> None:
        del self.names[name]
        if self.replica is not None:
            self.replica.removed(name)

    def _move(self, name: str, version: str) -> None:
        self.names[name] = version
        if self.replica is not None:
            self.replica.moved(name, version)

    # Here

    def fingerprint(self) -> str:
        return self.weights

    def stored(self, name: str, version: str) -> Path | None:
        path = self.adapters / name / version
        return path if path.is_dir() else None

    def why_not_stored(self, name: str, version: str) -> str | None:
        return self.not_stored

    def follow(self, name: str, path: Path, version: str, source: str) -> None:
        if self.refuses is not None:
            raise self.refuses
        text = (path / "weights").read_text()
        if version_of(text) != version:
            raise AdapterError(f"{path}: has the hash {version_of(text)}")
        self.followed.append(version)
        self.while_following()
        self.store(name, text)
        self._move(name, version)

    def unload(self, name: str) -> None:
        if name not in self.names:
            raise UnknownNameError("adapter", name, self.names)
        self.remove(name)


class Member:
    """A server and its replica. `start` after `stop` is a restart."""

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.url, self.server = root, url, Server(root)
        self.wall: Callable[[], float] = time.time
        self.changed_place: Callable[[Place], Place] = lambda place: place

    def start(self) -> None:
        file = StateFile(self.server.adapters)
        state = file.read(30000)
        registry = Registry(self.changed_place(open_place(self.url, state.replica)), state.replica, clock=self.wall)
        about = About(self.url, f"http://{self.root.name}", "model")
        self.replica = Replica(registry, self.server, file, state, about, wall=self.wall)
        for name, version in self.server.names.items():
            self.replica.moved(name, version)
        self.server.replica = self.replica
        self.replica.start()

    def stop(self) -> None:
        self.server.replica = None
        self.replica.close()
        assert not self.replica._thread.is_alive()

    @property
    def report(self) -> RegistryReport:
        return self.replica.report()

    @property
    def id(self) -> str:
        return self.report.replica

    def name(self, name: str) -> NameReport:
        return next(each for each in self.report.names if each.name == name)

    def is_at(self, name: str, revision: int) -> bool:
        found = {each.name: each for each in self.report.names}
        return name in found and found[name].revision_here == found[name].revision == revision

    def forget_state(self) -> None:
        shutil.rmtree(self.server.adapters / ".registry")
