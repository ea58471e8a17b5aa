"""The server under attack and what must not notice: four streams, a training run, the processes and their memory."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from system.fuzz.broken_adapters import broken_adapters, good_adapters

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.errors import KtError
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings

PRESET = "tiny-qwen3-moe"
STEADY = "steady"
STREAMS: tuple[tuple[str | None, list[int]], ...] = (
    (None, list(range(100, 140))),
    (STEADY, list(range(200, 217))),
    (None, [7, 9, 11]),
    (STEADY, list(range(300, 420))),
)
NEW_TOKENS = 160
STEPS = 4
# Memory that a process may keep after everything was taken back, as a share of what it had before.
KEPT_SHARE = 0.05
SETTLE_SECONDS = 60.0
MOST_RESIDENT_BYTES = 3 << 30


@dataclass(frozen=True)
class Gap:
    """Between two tokens of a stream. `seconds`: of the stream's clock. `since`, `until`: of CLOCK_MONOTONIC."""

    seconds: float
    since: float
    until: float


def _stream_body(adapter: str | None, prompt: list[int], stream: bool) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return {"input_ids": prompt, "lora_path": adapter, "sampling_params": sampling, "stream": stream}


class Stream(threading.Thread):
    """Asks the same, greedily, over and over. `expected`: the tokens of the quiet server. `rest_s`: between answers.
    `clock`: by which its waits are measured, in seconds."""

    def __init__(
        self,
        url: str,
        adapter: str | None,
        prompt: list[int],
        expected: list[int],
        rest_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._rest_s, self._clock = rest_s, clock
        self._url, self._body, self.expected = url, _stream_body(adapter, prompt, stream=True), expected
        self.gaps: list[Gap] = []
        self.faults: list[str] = []
        self.num_answers = 0
        self._last: tuple[float, float] | None = None  # by its clock, and by CLOCK_MONOTONIC
        self._finish = threading.Event()
        self._may_ask, self._rests = threading.Event(), threading.Event()
        self._may_ask.set()

    def waiting(self) -> Gap:
        """How long it has waited for its next token so far."""
        now, last = (self._clock(), time.monotonic()), self._last
        return _gap(last or now, now)

    def pause(self) -> None:
        """Returns when the answer in progress has ended; `resume` lets it ask again."""
        self._may_ask.clear()
        self._rests.wait()

    def resume(self) -> None:
        self._rests.clear()
        self._may_ask.set()

    def finish(self) -> None:
        """The answer in progress is the last one."""
        self._finish.set()
        self._may_ask.set()

    def run(self) -> None:
        # A connection for each answer: after a rest the server may close one that was kept, while it is used again.
        unkept = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(timeout=120.0, trust_env=False, limits=unkept) as client:
            while not self._finish.is_set() and len(self.faults) < 3:
                if not self._may_ask.is_set():
                    self._rests.set()
                    self._may_ask.wait()
                    continue
                try:
                    tokens = self._one(client)
                except (httpx.HTTPError, RuntimeError) as error:
                    self.faults.append(repr(error)[:500])
                    self._last = None
                    continue
                self.num_answers += 1
                self._finish.wait(self._rest_s)
                if tokens != self.expected:
                    self.faults.append(f"other tokens than on a quiet server: {tokens} for {self.expected}")
        self._rests.set()

    def _one(self, client: httpx.Client) -> list[int]:
        tokens: list[int] = []
        with client.stream("POST", f"{self._url}/generate", json=self._body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"status {answer.status_code}: {answer.read()[:300]!r}")
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now = self._clock(), time.monotonic()
                if self._last is not None:
                    self.gaps.append(_gap(self._last, now))
                self._last = now
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                tokens = event["output_ids"]
        self._last = None
        return tokens


def _gap(last: tuple[float, float], now: tuple[float, float]) -> Gap:
    return Gap(now[0] - last[0], last[1], now[1])


class TrainingRun(threading.Thread):
    """Rounds of a few steps from one saved state: each round has the first one's losses and publishes its version."""

    def __init__(self, client: ResidentClient, begin: str, rest_s: float = 0.0) -> None:
        super().__init__()
        self._client, self._begin, self._rest_s = client, begin, rest_s
        self.faults: list[str] = []
        self.num_rounds = 0
        self.expected = self._round()
        self._finish = threading.Event()

    def finish(self) -> None:
        self._finish.set()

    def run(self) -> None:
        while not self._finish.is_set() and len(self.faults) < 3:
            try:
                found = self._round()
            except KtError as error:
                self.faults.append(f"{type(error).__name__}: {error}"[:500])
                continue
            self.num_rounds += 1
            self._finish.wait(self._rest_s)
            if found != self.expected:
                self.faults.append(f"other losses or weights than on a quiet server: {found} for {self.expected}")

    def _round(self) -> tuple[list[float], str]:
        self._client.load("run", self._begin)
        losses = []
        for step in range(STEPS):
            tokens = np.random.default_rng(step).integers(3, 700, (2, 33)).tolist()
            batch = Batch.from_sequences([row[:-1] for row in tokens], [row[1:] for row in tokens])
            losses.append(self._client.forward_backward("run", batch).loss)
            self._client.optim_step("run", 0.01)
        return losses, self._client.publish("run", "trained").version


class Watch(threading.Thread):
    """Looks at the server's processes until one ends. `ended`: which, and when, in seconds of CLOCK_MONOTONIC.

    A process that takes more than `MOST_RESIDENT_BYTES` is killed, before the machine's memory is at its end.
    """

    INTERVAL_SECONDS = 0.1

    def __init__(self, processes: list[psutil.Process]) -> None:
        super().__init__(daemon=True)
        self.processes = processes
        self.names = {process.pid: _name(process) for process in processes}
        self.ended: tuple[str, float] | None = None
        self.any_ended = threading.Event()
        self._finish = threading.Event()

    def finish(self) -> None:
        self._finish.set()
        self.join()

    def run(self) -> None:
        while not self._finish.wait(self.INTERVAL_SECONDS):
            gone = [process for process in self.processes if not _lives(process)]
            large = [
                process
                for process in self.processes
                if process not in gone and _resident(process) > MOST_RESIDENT_BYTES
            ]
            if gone or large:
                reasons = [self.names[process.pid] for process in gone]
                reasons += [
                    f"{self.names[process.pid]} (killed: {_resident(process) / 2**30:.1f} GiB)" for process in large
                ]
                for process in large and self.processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                self.ended = (", ".join(reasons), time.monotonic())
                self.any_ended.set()
                return


def _name(process: psutil.Process) -> str:
    command = process.cmdline()
    return command[0] if len(command) == 1 else "kt-runtime serve" if "serve" in command else process.name()


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Room:
    """A server with adapters and a saved training session, and what of it is being watched."""

    api: ServerAPI
    place: Path
    processes: list[psutil.Process]
    client: ResidentClient
    good: list[Path]
    broken: list[Path]
    expected: list[list[int]] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.api.url.removeprefix("http://").split(":")
        return host, int(port)

    def watch(self) -> Watch:
        watch = Watch(self.processes)
        watch.start()
        return watch

    @contextlib.contextmanager
    def streaming(self, rest_s: float, clock: Callable[[], float]) -> Iterator[list[Stream]]:
        """Four streams, whose waits are measured by `clock`, until the block ends."""
        streams = [
            Stream(self.api.url, adapter, prompt, expected, rest_s, clock)
            for (adapter, prompt), expected in zip(STREAMS, self.expected, strict=True)
        ]
        for stream in streams:
            stream.start()
        try:
            yield streams
        finally:
            for stream in streams:
                stream.finish()
            for stream in streams:
                stream.join()

    @contextlib.contextmanager
    def training(self, rest_s: float) -> Iterator[TrainingRun]:
        with resident_client(self.api, timeout_s=120.0) as client:  # a client belongs to one thread
            run = TrainingRun(client, str(self.place / "begin"), rest_s)
            run.start()
            try:
                yield run
            finally:
                run.finish()
                run.join()

    def kill(self) -> None:
        """A server that stands still would take minutes to end by itself, and its streams to give up."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def flush(self) -> None:
        """Takes back what inputs have left: sessions, adapters, cached pages; waits until no request is in progress."""
        for session in self.client.status().sessions:
            if session.session != "run":
                self.client.close_session(session.session)
        for adapter in self.api.get("/kt/adapters")["adapters"]:
            if adapter["current"] and adapter["name"] not in (STEADY, "trained"):
                with contextlib.suppress(KtError):
                    self.api.delete(f"/kt/adapters/{adapter['name']}")
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.api.get("/kt/status")["requests_in_flight"]:
            if time.monotonic() > deadline:
                raise AssertionError(f"requests stay in progress: {self.api.get('/kt/status')}")
            time.sleep(0.1)
        answer = httpx.post(f"{self.api.url}/flush_cache", params={"timeout": 30}, timeout=60, trust_env=False)
        answer.raise_for_status()

    def processor_seconds(self) -> float:
        """Of all its processes so far."""
        seconds = 0.0
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds

    def memory(self) -> dict[str, int]:
        """Resident bytes of each process."""
        sizes = {}
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes[f"{_name(process)} {process.pid}"] = process.memory_info().rss
        return sizes


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, str]:
    """Processes that keep more than `KEPT_SHARE` of what they had before."""
    return {
        name: f"{before[name] / 2**20:.0f} MiB before, {size / 2**20:.0f} MiB after"
        for name, size in after.items()
        if size > before[name] * (1 + KEPT_SHARE)
    }


@contextlib.contextmanager
def room(place: Path) -> Iterator[Room]:
    """Starts a server in float32 whose working directory is `place`, and asks it what it answers while it is quiet."""
    place.mkdir(parents=True)
    make_model(PRESET, place / "model", seed=2)
    good = good_adapters(place / "model", place / "adapters-given", 3)
    broken = broken_adapters(good[0], place / "adapters-broken")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    options = ["--dtype", "float32", "--adapter-dir", str(place / "adapters"), "--max-lora-rank", "8"]
    with contextlib.chdir(place), server(str(place / "model"), options, place / "server.log") as api:
        processes = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        with resident_client(api, timeout_s=120.0) as client:
            made = Room(api, place, processes, client, good, broken)
            _prepare(made)
            yield made


def _prepare(made: Room) -> None:
    made.client.create_session("run", LoraSettings(rank=4, alpha=8.0, seed=1))
    made.client.save("run", str(made.place / "begin"))
    made.api.post("/kt/adapters", {"name": STEADY, "path": str(made.good[1])})
    made.expected = [
        made.api.post("/generate", _stream_body(adapter, prompt, stream=False))["output_ids"]
        for adapter, prompt in STREAMS
    ]
