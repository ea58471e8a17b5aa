"""The queue of grammars to compile, and the cache of compiled grammars.

They replace `ThreadPoolExecutor` and `dict` in `sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend`
(SGLang 0.5.23). In SGLang a compilation continues after its request has been aborted, each request with the same new
grammar compiles it again, and compiled grammars are kept forever.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from kt_runtime.sglang_patch.grammar.client import Cancellation, current_cancellation
from kt_runtime.sglang_patch.grammar.step import TRY_LATER

Key = tuple[str, str]
NUM_WORKERS = 2  # threads; each waits for one grammar's process
MAX_KEPT = 32  # compiled grammars in the cache; each is a process
TIMED_OUT = "Grammar preprocessing timed out"  # SGLang's message for a grammar that waited too long in the queue
MAX_REFUSED = 256  # cached refusals, so that a refused grammar is refused again without compiling


class GrammarFuture(Future[Any]):
    """Stays pending until it has its result, so that `cancel` succeeds until then."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self.job.leave(self)
        return cancelled


class Job:
    """One compilation and its waiting requests. `wait` and `leave` are called in the scheduler's thread."""

    def __init__(self, compile_grammar: Callable[..., Any], key: Key, require_reasoning: bool) -> None:
        self.compile_grammar, self.key, self.require_reasoning = compile_grammar, key, require_reasoning
        self.cancellation = Cancellation()
        self.lock = threading.Lock()
        self.is_done = False
        self.waiting: list[GrammarFuture] = []

    def wait(self) -> GrammarFuture | None:
        """A future for the result; None if the job has ended or been cancelled."""
        with self.lock:
            if self.is_done or self.cancellation.cancelled:
                return None
            future = GrammarFuture(self)
            self.waiting.append(future)
            return future

    def leave(self, future: GrammarFuture) -> None:
        with self.lock:
            if future in self.waiting:
                self.waiting.remove(future)
            nobody_waits = not self.waiting
        if nobody_waits:
            self.cancellation.cancel()

    def run(self) -> None:
        if self.cancellation.cancelled:
            return
        current_cancellation.set(self.cancellation)
        grammar = error = None
        try:
            grammar = self.compile_grammar(self.key, self.require_reasoning)
        except Exception as caught:  # noqa: BLE001  # the request's answer, as a thread pool's future would hold it
            error = caught
        with self.lock:
            self.is_done = True
            waiting, self.waiting = self.waiting, []
        for position, future in enumerate(waiting):
            with suppress(InvalidStateError):  # cancelled just now
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(grammar if position == 0 else self._copy(grammar))

    def _copy(self, grammar: Any) -> Any:
        """A copy as SGLang makes one from its cache."""
        copied = grammar.copy()
        copied.maybe_init_reasoning(self.require_reasoning)
        return copied


class GrammarExecutor:
    """Two threads, started with the first grammars. A job whose requests were all aborted is skipped or cancelled."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._running: dict[tuple[Key, bool], Job] = {}
        self._num_threads = 0

    def submit(self, compile_grammar: Callable[..., Any], key: Key, require_reasoning: bool) -> GrammarFuture:
        job = self._running.get((key, require_reasoning))
        future = job.wait() if job is not None else None
        if future is None:
            job = Job(compile_grammar, key, require_reasoning)
            future = job.wait()
            assert future is not None
            self._running[(key, require_reasoning)] = job
            self._jobs.put(job)
            self._start_thread()
        return future

    def _start_thread(self) -> None:
        if self._num_threads < NUM_WORKERS:
            self._num_threads += 1
            threading.Thread(target=self._work, name="grammars", daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            job.run()
            place = (job.key, job.require_reasoning)
            if self._running.get(place) is job:
                self._running.pop(place, None)
            del job  # drops the grammar too, unless a request uses it


def is_for_now(message: str) -> bool:
    """Whether a grammar was refused because of overload, so that a later attempt may succeed."""
    return message.endswith(TRY_LATER) or message.startswith(TIMED_OUT)


class GrammarCache:
    """An LRU cache with the dict methods that SGLang uses. `evict` may be called in any thread.

    `process_of(grammar)`: the grammar's process, None for a refused grammar. `refuse(reason)`: SGLang's object for a
    refused grammar. Refusals because of overload are not cached.
    """

    def __init__(self, process_of: Callable[[Any], Any], refuse: Callable[[str], Any]) -> None:
        self._process_of, self._refuse = process_of, refuse
        self._compiled: collections.OrderedDict[Key, Any] = collections.OrderedDict()
        self._refused: collections.OrderedDict[Key, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._compiled) + len(self._refused)

    def get(self, key: Key) -> Any:
        """The cached grammar or refusal; None to compile. A grammar whose process exceeded its own limits is refused
        from then on. One whose process ended otherwise, for example by a step's shared limit, is compiled again."""
        with self._lock:
            found = self._compiled.get(key)
            if found is None:
                return self._refused.get(key)
            process = self._process_of(found)
            if not process.ended:
                self._compiled.move_to_end(key)
                return found
            del self._compiled[key]
        if process.failure is None or not process.failure.is_lasting:
            return None
        self[key] = refused = self._refuse(f"matching it {process.failure.reason}")
        return refused

    def __setitem__(self, key: Key, grammar: Any) -> None:
        is_refused = self._process_of(grammar) is None
        if is_refused and is_for_now(grammar.error_message):
            return
        kept, most = (self._refused, MAX_REFUSED) if is_refused else (self._compiled, MAX_KEPT)
        with self._lock:
            kept[key] = grammar
            kept.move_to_end(key)
            dropped = [kept.popitem(last=False)[1] for _ in range(len(kept) - most)]
        del dropped  # outside the lock: it may end a process

    def evict(self) -> bool:
        """Drops the least recently used compiled grammar. False if there is none."""
        with self._lock:
            dropped = self._compiled.popitem(last=False) if self._compiled else None
        return dropped is not None

    def pop(self, key: Key, default: Any = None) -> Any:
        with self._lock:
            return self._compiled.pop(key, None) or self._refused.pop(key, default)

    def clear(self) -> None:
        with self._lock:
            dropped = list(self._compiled.values())
            self._compiled.clear()
            self._refused.clear()
        del dropped
