"""What a replica needs of its own server, called from threads other than the event loop's."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kt_runtime.errors import UnknownNameError
from kt_runtime.serve.http.adapters import Adapters

_R = TypeVar("_R")


class Here(Protocol):
    """Methods raise KtError. Each may be called from any thread but the event loop's."""

    def fingerprint(self) -> str:
        """The fingerprint of the weights; empty until it is known and an earlier run's adapters are served again."""
        ...

    def stored(self, name: str, version: str) -> Path | None:
        """The version's directory, None if it is not on disk (yet)."""
        ...

    def why_not_stored(self, name: str, version: str) -> str | None:
        """None if the server does not know the version any more."""
        ...

    def follow(self, name: str, path: Path, version: str, source: str) -> None:
        """Serves the directory as `name`. Raises AdapterError if its content has another hash than `version`."""
        ...

    def unload(self, name: str) -> None: ...


class ThisServer:
    """`directory`: of published versions, ROOT/NAME/VERSION. Made in the event loop."""

    def __init__(self, adapters: Adapters, directory: Path) -> None:
        self._adapters, self._directory = adapters, directory
        self._loop = asyncio.get_running_loop()

    def fingerprint(self) -> str:
        status = self._run(self._adapters.status())
        return "" if status["restoring"] else str(status["fingerprint"])

    def stored(self, name: str, version: str) -> Path | None:
        path = self._directory / name / version
        return path if path.is_dir() else None

    def why_not_stored(self, name: str, version: str) -> str | None:
        try:
            versions = self._run(self._adapters.show(name))["versions"]
        except UnknownNameError:
            return None
        reasons = [each["not_stored"] or "" for each in versions if each["version"] == version]
        return reasons[0] if reasons else None

    def follow(self, name: str, path: Path, version: str, source: str) -> None:
        self._run(self._adapters.follow(name, str(path), version, source))

    def unload(self, name: str) -> None:
        self._run(self._adapters.unload(name))

    def _run(self, work: Coroutine[Any, Any, _R]) -> _R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
