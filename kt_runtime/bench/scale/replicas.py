"""The measurement on running servers: one publishes, all answer."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kt_runtime.bench.scale.plan import Plan
from kt_runtime.bench.swap.files import write_adapter
from kt_runtime.bench.swap.plan import Size
from kt_runtime.bench.swap.streams import FIRST_TOKEN, now
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.errors import KtError, RuntimeFault

NAME = "bench-scale"
TIMEOUT_S = 300.0
LOOK_SECONDS = 0.01
SETTLE_SECONDS = 1.0
"""Pause between two publications, in which their files are written."""
STREAM_TOKENS = 16


@dataclass(frozen=True)
class Round:
    """Milliseconds from the request that publishes: `publish_ms` to its answer, `first_token_ms` to the first token of
    the new version on each replica, the publishing one first."""

    publish_ms: float
    first_token_ms: list[float]


class Replicas:
    """`config`: the model's config.json. `directory`: for the adapters' files."""

    def __init__(
        self, plan: Plan, apis: Sequence[ServerAPI], config: Mapping[str, Any], size: Size, directory: Path
    ) -> None:
        self._plan, self._apis, self._config, self._size, self._directory = plan, apis, config, size, directory
        self.failures: list[str] = []
        self.num_requests = 0
        self._lock = threading.Lock()

    def rounds(self, say: Callable[[str], None]) -> list[Round]:
        """The first publication, in which the name is new, does not count."""
        self._round(0)
        found = []
        with self._streams():
            for number in range(1, self._plan.rounds + 1):
                time.sleep(SETTLE_SECONDS)
                found.append(self._round(number))
                times = ", ".join(f"{each:.0f}" for each in found[-1].first_token_ms)
                say(f"published in {found[-1].publish_ms:.0f} ms; first tokens after {times} ms")
        return found

    def _round(self, seed: int) -> Round:
        """Each adapter is new: no replica has its files."""
        path = write_adapter(self._directory / f"adapter-{seed}", self._size, self._config, seed)
        before = [_version(api) for api in self._apis]
        with ThreadPoolExecutor(len(self._apis)) as threads:
            began = now()
            waiting = [
                threads.submit(self._first_token, api, version) for api, version in zip(self._apis, before, strict=True)
            ]
            published = self._apis[0].post("/kt/adapters", {"name": NAME, "path": str(path), "take_over": True})
            answered = now()
            ends = [each.result() for each in waiting]
        shutil.rmtree(path)
        for version, _ in ends:
            if version != published["version"]:
                raise RuntimeFault(f"a replica moved to {version}; published was {published['version']}")
        return Round(1e3 * (answered - began), [1e3 * (end - began) for _, end in ends])

    def _first_token(self, api: ServerAPI, before: str | None) -> tuple[str, float]:
        """The version after `before`, and when its first token came."""
        deadline = now() + TIMEOUT_S
        while (version := _version(api)) in (before, None):
            if now() > deadline:
                problem = api.get("/kt/registry")["problem"]
                raise RuntimeFault(f"{api.url}: {NAME} has not moved for {TIMEOUT_S:.0f} s; {problem or 'no reason'}")
            time.sleep(LOOK_SECONDS)
        _generate(api, 1)
        return str(version), now()

    @contextmanager
    def _streams(self) -> Iterator[None]:
        """Each asks its replica for the name again and again; a request that fails is noted."""
        ended = threading.Event()

        def stream(api: ServerAPI) -> None:
            while not ended.is_set():
                try:
                    _generate(api, STREAM_TOKENS)
                except (KtError, httpx.HTTPError) as error:
                    with self._lock:
                        self.failures.append(f"{api.url}: {error}")
                with self._lock:
                    self.num_requests += 1

        threads = [
            threading.Thread(target=stream, args=(ServerAPI(api.url, timeout_s=TIMEOUT_S),))
            for api in self._apis
            for _ in range(self._plan.streams)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def _version(api: ServerAPI) -> str | None:
    """What the name means there. The server's HTTP process answers this alone: asking the engine for the adapter would
    wait for its turn, and take processor time from what is measured."""
    names = {each["name"]: each["version_here"] for each in api.get("/kt/registry")["names"]}
    version: str | None = names.get(NAME)
    return version


def _generate(api: ServerAPI, num_tokens: int) -> None:
    sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    api.post("/generate", {"input_ids": [FIRST_TOKEN], "sampling_params": sampling, "lora_path": NAME})
