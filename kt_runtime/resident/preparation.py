"""What takes long of a publication, on threads beside the engine: reading, completing, checking, hashing, converting.

The engine's thread hands a function over and later takes what it made. Results are kept by the id under which the
adapter is to be served, until they are taken or given up.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kt_runtime.adapters import AdapterTensors, AdapterVersion

NUM_THREADS = 2
"""So that a directory on a slow disk does not hold up every other name. Each may hold an adapter twice."""


@dataclass(frozen=True)
class Prepared:
    """`adapter`: complete and checked, with tensors of its own. `servable`: the engine's form of it.

    `version.lora_id` is None: it is not installed yet.
    """

    adapter: AdapterTensors
    version: AdapterVersion
    servable: object


class Preparation:
    """`ready(lora_id, error)` is called on one of the threads, once for each `begin` that was not given up."""

    def __init__(self, ready: Callable[[str, Exception | None], None]) -> None:
        self._ready = ready
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kt-prepare")
        self._futures: dict[str, Future[Prepared]] = {}

    def begin(self, lora_id: str, make: Callable[[], Prepared]) -> None:
        future = self._threads.submit(make)
        self._futures[lora_id] = future
        future.add_done_callback(lambda done: self._tell(lora_id, done))

    def take(self, lora_id: str) -> Prepared:
        """Waits where this rank is later than rank 0, which said that it is ready. Raises what `make` raised."""
        return self._futures.pop(lora_id).result()

    def give_up(self, lora_id: str) -> None:
        """The result is not wanted any more; what has begun runs to its end. An unknown id is ignored."""
        future = self._futures.pop(lora_id, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        """Begins nothing more, and does not wait for what runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _tell(self, lora_id: str, future: Future[Prepared]) -> None:
        if not future.cancelled():
            error = future.exception()
            self._ready(lora_id, error if isinstance(error, Exception) else None)
