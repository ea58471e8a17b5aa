"""The measurements on a running server: sessions that publish, files that are loaded, cycles, swaps under streams."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil

from kt_runtime.bench.swap.figures import CONTROL, PHASES, Swap, row_of
from kt_runtime.bench.swap.files import write_adapter
from kt_runtime.bench.swap.plan import TARGETS, Plan, Size, rank_bytes, smallest
from kt_runtime.bench.swap.streams import FIRST_TOKEN, Naps, Streams, now
from kt_runtime.bench.train.plan import LEARNING_RATE
from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.errors import RuntimeFault
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings

TIMEOUT_S = 3600.0
NAME, SESSION = "bench-swap", "bench-swap"
STREAM_TOKENS, MANY_STREAM_TOKENS = 2400, 300
"""Tokens of a stream: more than it gets in a round."""
QUIET_SECONDS = 1.5
"""Measured before anything is published, and again at the end; at most as long as the control."""
CONTROL_ROUNDS = 10
LEAST_GAPS = 4
"""Gaps of each stream that are measured, at least, before anything is published."""
SETTLE_SECONDS = 0.5
"""Pause between two calls of a round."""
REPORTED_SECONDS = 4.0
"""A virtual machine reports free pages to its host every two seconds, and may stop while the host takes them. Those
that the bench freed after it made a file are not the server's."""


def stolen_ms() -> float | None:
    """Milliseconds that the host has taken since the machine started, a mean of the processors (proc_stat(5), steal).
    None: unknown."""
    stolen = getattr(psutil.cpu_times(), "steal", None)
    return None if stolen is None else 1e3 * stolen / psutil.cpu_count()


@dataclass
class _Round:
    """`calls`: when each began and ended. `stolen_before_ms`: since the machine started, at the round's begin.
    `is_control`: nothing is published in it."""

    is_control: bool
    stolen_before_ms: float | None
    calls: list[tuple[float, float]] = field(default_factory=list)


class _Measured:
    """Calls functions while `streams` decode, of which `count` run."""

    def __init__(self, streams: Streams, count: int) -> None:
        self._streams, self._count = streams, count
        self.rounds: list[_Round] = []

    def begin_round(self, *, is_control: bool = False) -> None:
        self.rounds.append(_Round(is_control, stolen_ms()))

    def whole_rounds(self, ended: float) -> list[list[tuple[float, float]]]:
        """Each round's time: from its first call to that of the next round, or to `ended`."""
        began = [each.calls[0][0] for each in self.rounds]
        return [[times] for times in zip(began, [*began[1:], ended], strict=True)]

    def stolen_in_rounds_ms(self, *, is_control: bool) -> float | None:
        """Milliseconds stolen in all rounds of a kind. The last round has just ended."""
        kinds = [each.is_control for each in self.rounds]
        counted = [*(each.stolen_before_ms for each in self.rounds), stolen_ms()]
        known = [each for each in counted if each is not None]
        if is_control not in kinds or len(known) < len(counted):
            return None
        return sum(b - a for kind, (a, b) in zip(kinds, pairwise(known), strict=True) if kind == is_control)

    def __call__(self, call: Callable[[], object], times_ms: list[float] | None = None) -> None:
        started = now()
        call()
        ended = now()
        self.rounds[-1].calls.append((started, ended))
        if times_ms is not None:
            times_ms.append(1e3 * (ended - started))

    def settle(self) -> None:
        """Waits until every stream has got a token: no gap of the calls before is counted for the next call."""
        self._streams.wait_for_gaps_ms(now(), self._count)


def _added_ms(known_ms: float | None, more_ms: float | None) -> float | None:
    """Sum of both; None: unknown to the system, or no round of this kind."""
    return known_ms if more_ms is None else (known_ms or 0.0) + more_ms


class SwapBench:
    """`config`: the model's config.json. `directory`: for the adapters' files, one at a time."""

    def __init__(
        self, plan: Plan, api: ServerAPI, config: Mapping[str, Any], directory: Path, say: Callable[[str], None]
    ) -> None:
        self._plan, self._api, self._config, self._directory, self._say = plan, api, config, directory, say
        self._http = httpx.Client(base_url=api.url, timeout=TIMEOUT_S, trust_env=False)
        self._vocabulary = int(config["vocab_size"])
        self.failures: list[str] = []

    def control(self) -> Swap:
        """Requests for one token of the base, and nothing is published: the machine's own gaps."""
        found = Swap(CONTROL, None, 0, "none", 0, self._plan.streams)
        with self._streams(found, self._plan.streams, STREAM_TOKENS) as measured:
            for _ in range(CONTROL_ROUNDS):
                measured.begin_round()
                measured(partial(self._first_token, None), found.first_token_ms)
                time.sleep(self._plan.control_seconds / CONTROL_ROUNDS)
        self._told(found)
        return found

    def sessions(self) -> list[Swap]:
        return [self._session(rank, targets) for rank in self._plan.ranks for targets in TARGETS]

    def loads(self, sizes: Sequence[Size]) -> list[Swap]:
        return [self._load(each) for each in sizes]

    def swaps(self) -> Swap:
        """Streams use a name that moves between two versions. Each stream keeps the version that it began with."""
        plan, size = self._plan, smallest(self._plan, self._config)
        found = Swap("swap", size.name, size.rank, size.targets, size.num_bytes, plan.many_streams)
        paths = [write_adapter(self._directory / f"swap-{seed}", size, self._config, seed) for seed in range(2)]
        self._publish_file(paths[0])
        with self._streams(found, plan.many_streams, MANY_STREAM_TOKENS, NAME) as measured:
            for number in range(plan.swaps):
                measured.begin_round()
                measured(partial(self._publish_file, paths[(number + 1) % 2]), found.publish_ms)
                time.sleep(SETTLE_SECONDS)
        self._unload()
        self._remove(paths)
        self._told(found)
        return found

    def cycles(self) -> list[int]:
        """The engine's resident set after each cycle: a publication, its first token, its end."""
        size = smallest(self._plan, self._config)
        paths = [write_adapter(self._directory / f"cycle-{seed}", size, self._config, seed) for seed in range(2)]
        found: list[int] = []
        for number in range(self._plan.cycles):
            self._publish_file(paths[number % 2])
            self._first_token()
            self._unload()
            found.append(int(self._api.get("/kt/status")["rss_bytes"]))
        self._remove(paths)
        if found:
            self._say(
                f"{len(found)} cycles: {found[0] >> 20} MiB after the first, {found[-1] >> 20} MiB after the last"
            )
        return found

    def _session(self, rank: int, targets: str) -> Swap:
        plan = self._plan
        found = Swap("session", None, rank, targets, rank * rank_bytes(self._config, targets), plan.streams)
        batch = Batch.from_sequences([[FIRST_TOKEN, FIRST_TOKEN + 1]], [[FIRST_TOKEN + 1, FIRST_TOKEN + 2]])
        with resident_client(self._api, TIMEOUT_S) as client:
            client.create_session(SESSION, LoraSettings(rank=rank, alpha=float(rank), targets=[targets]))
            for _ in range(plan.rounds + 1):  # the first one, in which the name is new, does not count
                with self._streams(found, plan.streams, STREAM_TOKENS, whole=False) as measured:
                    client.forward_backward(SESSION, batch)
                    client.optim_step(SESSION, LEARNING_RATE)
                    stepped = now()
                    measured.settle()
                    measured.begin_round()
                    measured(lambda: client.publish(SESSION, NAME, take_over=True), found.publish_ms)
                    measured(self._first_token)
                    found.first_token_ms.append(1e3 * (now() - stepped))
                self._wait_until_stored()
            del found.publish_ms[0], found.first_token_ms[0]
            client.close_session(SESSION)
        self._unload()
        self._told(found)
        return found

    def _load(self, size: Size) -> Swap:
        found = Swap("load", size.name, size.rank, size.targets, size.num_bytes, self._plan.streams)
        self._say(f"an adapter of {size.name}: rank {size.rank}, {size.targets}")
        path = write_adapter(self._directory / "load", size, self._config, 0)
        time.sleep(REPORTED_SECONDS)
        for _ in range(self._plan.rounds):
            with self._streams(found, self._plan.streams, STREAM_TOKENS) as measured:
                began = now()
                measured.begin_round()
                measured(lambda: self._publish_file(path), found.publish_ms)
                measured.settle()  # the gap in which the name moved is over, and contains no prompt
                measured(self._first_token, found.first_token_ms)
                found.first_token_ms[-1] += found.publish_ms[-1]
                time.sleep(SETTLE_SECONDS)
                measured(self._unload, found.unload_ms)
                time.sleep(SETTLE_SECONDS)
                measured(self._wait_until_stored)
                lasted = now() - began
            with self._streams(found, self._plan.streams, STREAM_TOKENS) as measured:
                measured.begin_round(is_control=True)
                measured(partial(self._first_token, None))
                time.sleep(lasted)
        self._remove([path])
        self._told(found)
        return found

    def _wait_until_stored(self) -> None:
        """A version is written to disk after its publication. Waiting keeps the write out of what is measured next."""
        ends = now() + TIMEOUT_S
        while self._api.get("/kt/status")["not_stored"]:
            if now() > ends:
                raise RuntimeFault(f"an adapter was not stored in {TIMEOUT_S:.0f} s")
            time.sleep(SETTLE_SECONDS)

    @contextmanager
    def _streams(
        self, found: Swap, count: int, new_tokens: int, adapter: str | None = None, *, whole: bool = True
    ) -> Iterator[_Measured]:
        """Streams that decode in the block, and what measures them. `whole`: gaps between a round's calls and after
        them count, too. Before the block and after it nothing but the streams runs.

        Streams that begin at the same time also end at the same time, and the prompts of the next ones stop those that
        still run. So the block should be shorter than `new_tokens` steps: a block for each round of a load or session.
        """
        with Streams(self._api.url, count, new_tokens, self._vocabulary, adapter) as streams, Naps() as naps:
            found.quiet += self._quiet(streams, count)
            measured = _Measured(streams, count)
            yield measured
            ended = now()
            found.stolen_ms = _added_ms(found.stolen_ms, measured.stolen_in_rounds_ms(is_control=False))
            in_control_ms = measured.stolen_in_rounds_ms(is_control=True)
            found.control_stolen_ms = _added_ms(found.control_stolen_ms, in_control_ms)
            measured.settle()  # the gaps at the end are over, too
            spans = measured.whole_rounds(ended) if whole else [each.calls for each in measured.rounds]
            for each, times in zip(measured.rounds, spans, strict=True):
                gaps = [gap for since, until in times for gap in streams.gaps(since, until)]
                (found.control if each.is_control else found.during).append([1e3 * (b - a) for a, b in gaps])
                running = [1e3 * (b - a) - naps.stopped_ms(a, b) for a, b in gaps]
                (found.control_running if each.is_control else found.running).append(running)
                stopped = max(naps.latest_ms(*span) for span in times)
                (found.control_stopped_ms if each.is_control else found.stopped_ms).append(stopped)
                if len(each.calls) == len(PHASES):
                    begins = [*(began for began, _ in each.calls), times[-1][1]]
                    for name, span in zip(PHASES, pairwise(begins), strict=True):
                        found.phases.setdefault(name, []).append(streams.ended_gaps_ms(*span))
            time.sleep(SETTLE_SECONDS)
            found.quiet += self._quiet(streams, count)
        self.failures += streams.failures

    def _quiet(self, streams: Streams, count: int) -> list[float]:
        """The streams' gaps while nothing else is done."""
        began = now()
        time.sleep(min(QUIET_SECONDS, self._plan.control_seconds))
        return streams.wait_for_gaps_ms(began, LEAST_GAPS * count)

    def _publish_file(self, path: Path) -> None:
        self._api.post("/kt/adapters", {"name": NAME, "path": str(path), "take_over": True}, TIMEOUT_S)

    def _unload(self) -> None:
        self._api.delete(f"/kt/adapters/{NAME}")

    def _first_token(self, adapter: str | None = NAME) -> None:
        body = {
            "input_ids": [FIRST_TOKEN],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "lora_path": adapter,
        }
        answer = self._http.post("/generate", json=body)
        if not answer.is_success:
            self.failures.append(f"HTTP {answer.status_code}: {answer.text[:200]}")

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            shutil.rmtree(path)

    def _told(self, found: Swap) -> None:
        name, row = found.size or f"rank {found.rank} on {found.targets}", row_of(found)
        times = ", ".join(f"{each:.0f}" for each in found.publish_ms)
        stalls = f"{row['stall_ms']:.0f} ms, median {row['median_stall_ms']:.0f}, quiet {row['quiet_stall_ms']:.0f}"
        if row["control_stall_ms"] is not None:
            stalls += f", control {row['control_stall_ms']:.0f}, median {row['control_median_stall_ms']:.0f}"
            of_phases = ((each, row[f"{each}_stall_ms"], row[f"{each}_median_stall_ms"]) for each in PHASES)
            known = [each for each in of_phases if each[1] is not None]  # a phase can be shorter than a step
            stalls += "".join(f", {name} {longest:.0f}, median {usual:.0f}" for name, longest, usual in known)
        stolen = "" if row["stolen_ms"] is None else f", stolen {row['stolen_ms']:.0f}"
        stolen += f", stopped {row['stopped_ms']:.0f}, without stops {row['running_stall_ms']:.0f}"
        self._say(
            f"{found.what} {name}: published in {times} ms; step {row['decode_step_ms']:.0f}, stall {stalls}{stolen}"
        )
