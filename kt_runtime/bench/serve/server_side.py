"""kt-runtime's side: a server started as users start it, measured by its HTTP clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kt_runtime.bench.serve.adapters import load_adapters
from kt_runtime.bench.serve.plan import DECODE, PREFILL, Case, Plan
from kt_runtime.bench.serve.rows import Measured, TokenTime
from kt_runtime.bench.serve.scores import PROMPTS, Scores, served_scores
from kt_runtime.bench.serve.streams import Stream, decode, generate_body, tokens_per_s
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.errors import RuntimeFault

TIMEOUT_S = 3600.0
WARM_UP_TOKENS = 4
FIRST_TOKEN = 3  # smaller ids are special tokens of a made model
SPARE_OF_STREAM = 16  # tokens of the KV cache, so that no stream waits for another one's end
ATTEMPTS = 3  # for a run in which all streams decode at the same time
CACHED_SHARE = 0.01  # of a prompt: random prompts may share their first tokens


@dataclass(frozen=True)
class Transcript:
    """Token ids by run and stream; a prefill case has one stream, and one token of answer."""

    prompts: list[list[list[int]]]
    answers: list[list[list[int]]]


Measurements = dict[Case, tuple[Measured, Transcript]]


@dataclass
class ServerResult:
    """`status`: of GET /kt/status before the first case. `measured`: the cases with at least one run. `problems`: why a
    case has fewer runs than planned, or none. `device_bytes`: what the server took of the device's memory; 0: unknown.
    `last_status`: as `status`, after the last case. `scores`: of the base, of a few prompts.
    """

    status: Mapping[str, Any] = field(default_factory=dict)
    measured: Measurements = field(default_factory=dict)
    problems: dict[Case, str] = field(default_factory=dict)
    device_bytes: int = 0
    last_status: Mapping[str, Any] = field(default_factory=dict)
    scores: Scores = field(default_factory=Scores)

    @property
    def step(self) -> str:
        """`STEP_RUNNING`, or why the server does not run the native step."""
        return str(self.status.get("step", ""))


@dataclass(frozen=True)
class Run:
    """Prompts and answers by stream. `token_time`: None: unknown, as with several streams."""

    tokens_per_s: float
    prompts: list[list[int]]
    answers: list[list[int]]
    token_time: TokenTime | None = None


def settings(plan: Plan, cases: list[Case], dtype: str) -> dict[str, Any]:
    """The server's options that the cases need, as fields of `serve.options.named.ServeOptions`."""
    context, streams = plan.context_tokens(cases), plan.most_streams(cases)
    return {
        "dtype": dtype,
        "context_tokens": context,
        "max_total_tokens": max(context, streams * (plan.stream_tokens + SPARE_OF_STREAM)),
        "max_running_requests": max(1, streams),
        "max_lora_rank": plan.rank,
        "lora_slots": 1 + max(1, plan.most_streams(cases, adapters=True)),  # the base takes one
        "max_sessions": 1,
    }


class ServerSide:
    """Measures the cases in their order; adapters are loaded before the first case that has them.

    `repeated`: another server's cases. They are measured again, with the same prompts and `--no-step`; `cases` then
    only choose the server's options. `extra`: further options of the server. `free_bytes`: of the device, asked before
    the server starts and before it ends. `result` grows case by case, so an error leaves the earlier cases.
    """

    def __init__(
        self,
        plan: Plan,
        cases: list[Case],
        config: Mapping[str, Any],
        dtype: str,
        say: Callable[[str], None],
        repeated: Measurements | None = None,
        extra: Sequence[str] = (),
        free_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._plan, self._cases, self._config, self._dtype, self._say = plan, cases, config, dtype, say
        self._repeated, self._extra, self._free_bytes = repeated, extra, free_bytes
        # Another seed for the second server: its warm-ups must not begin as prompts that it computes later.
        self._random = np.random.default_rng(0 if repeated is None else 1)
        self._adapters: list[str] = []
        self.result = ServerResult()

    def without_step(self, say: Callable[[str], None]) -> ServerSide:
        """The same server with `--no-step`, for the cases that this one has measured."""
        return ServerSide(self._plan, self._cases, self._config, self._dtype, say, self.result.measured)

    def measure(self, model: Path, directory: Path) -> ServerResult:
        """`directory`: for the server's files. The server has ended on return."""
        self._say(f"starting a server in {self._dtype}")
        before = self._free_bytes()
        with self._started(model, directory) as started:
            api = ServerAPI(started.url, timeout_s=TIMEOUT_S)
            self.result.status = self._status(api)
            if self._repeated is None:
                self.result.scores = served_scores(api, self._scored_prompts())
            for case in self._measured_cases():
                if case.adapters and not self._adapters:
                    self._load_adapters(api, directory)
                self._measure(api, case)
            self.result.device_bytes, self.result.last_status = before - self._free_bytes(), self._status(api)
        return self.result

    def _scored_prompts(self) -> list[list[int]]:
        """Prompts from a seed of their own, so that the cases' prompts stay those of earlier reports."""
        shape, random = (PROMPTS, self._plan.prompt_tokens), np.random.default_rng(2)
        prompts: list[list[int]] = random.integers(FIRST_TOKEN, int(self._config["vocab_size"]), shape).tolist()
        return prompts

    def _started(self, model: Path, directory: Path) -> AbstractContextManager[ServerAPI]:
        return server(str(model), self._options(directory), directory / "server.log")

    def _status(self, api: ServerAPI) -> Mapping[str, Any]:
        """What the server says of itself; empty if it says nothing."""
        status: Mapping[str, Any] = api.get("/kt/status")
        return status

    def _measured_cases(self) -> list[Case]:
        return self._cases if self._repeated is None else list(self._repeated)

    def _options(self, directory: Path) -> list[str]:
        options = [*self._serving_options(), "--adapter-dir", str(directory / "adapters"), *self._extra]
        return [*options, *["--no-step"] * (self._repeated is not None)]

    def _serving_options(self) -> list[str]:
        """Pairs of a name and a value."""
        made = settings(self._plan, self._cases, self._dtype)
        return [text for name, value in made.items() for text in (f"--{name.replace('_', '-')}", str(value))]

    def _load_adapters(self, api: ServerAPI, directory: Path) -> None:
        count = self._plan.most_streams(self._cases, adapters=True)
        self._say(f"loading {count} adapters of rank {self._plan.rank}")
        self._adapters = load_adapters(api, self._config, self._plan.rank, count, directory)

    def _measure(self, api: ServerAPI, case: Case) -> None:
        """One uncounted run, then the counted ones, each with prompts of its own, which no cache has. A run without a
        rate ends the case."""
        self._warm_up(api, case)
        runs: list[Run] = []
        planned = self._plan.runs if self._repeated is None else len(self._repeated[case][1].prompts)
        for number in range(planned):
            run = self._run(api, case, number)
            if run is None:
                self._stop_early(case, number, planned)
                break
            runs.append(run)
        if runs:
            measured = Measured([run.tokens_per_s for run in runs], token_times=_token_times(runs))
            transcript = Transcript([run.prompts for run in runs], [run.answers for run in runs])
            self.result.measured[case] = measured, transcript
            self._say(f"{case}: {measured.tokens_per_s:.1f} tokens/s")

    def _stop_early(self, case: Case, measured: int, planned: int) -> None:
        problem = (
            f"{measured} of {planned} runs were measured: in {ATTEMPTS} attempts at the next one the streams hardly "
        )
        self.result.problems[case] = problem + "decoded at the same time; ask for more --new-tokens"
        self._say(f"{case}: {self.result.problems[case]}")

    def _run(self, api: ServerAPI, case: Case, number: int) -> Run | None:
        """None if the streams do not decode at the same time, though run ATTEMPTS times."""
        if case.kind == PREFILL:
            prompts = self._prompts(case, number)
            rate, answers = self._prefill(api, prompts)
            return Run(rate, prompts, answers)
        for _ in range(ATTEMPTS):
            prompts, before = self._prompts(case, number), self._status(api)
            streams = self._streams(api, case, prompts, self._plan.new_tokens)
            if (common := tokens_per_s(streams)) is not None:
                token_time = None if case.adapters else self._token_time(case, before, self._status(api))
                return Run(common, prompts, [stream.answer for stream in streams], token_time)
            self._say(f"{case}: the streams hardly decoded at the same time")
        return None

    def _token_time(self, case: Case, before: Mapping[str, Any], after: Mapping[str, Any]) -> TokenTime | None:
        """Seconds for a token of every stream that decoded between two answers of GET /kt/status. None if the native
        step did not compute all tokens but each stream's first, which belongs to the prompt.

        Where streams began one after the other, a few batches hold fewer of them. Their seconds are counted as if a
        token took as long in all batches, which overstates a full batch's time."""
        names = ("step_decode_tokens", "step_decode_seconds", "head_decode_seconds", "sampling_decode_seconds")
        tokens, *seconds = (after.get(name, 0) - before.get(name, 0) for name in names)
        if tokens != case.size * (self._plan.new_tokens - 1):
            return None
        return TokenTime(*(case.size * each / tokens for each in seconds))

    def _warm_up(self, api: ServerAPI, case: Case) -> None:
        prompts = self._random_prompts(case)
        if case.kind == PREFILL:
            self._prefill(api, prompts)
        else:
            self._streams(api, case, prompts, WARM_UP_TOKENS)

    def _prompts(self, case: Case, number: int) -> list[list[int]]:
        """New ones in each attempt at a run. Those of a repeated run may be cached then, which decoding does not
        depend on."""
        return self._random_prompts(case) if self._repeated is None else self._repeated[case][1].prompts[number]

    def _random_prompts(self, case: Case) -> list[list[int]]:
        count, tokens = (case.size, self._plan.prompt_tokens) if case.kind == DECODE else (1, case.size)
        vocabulary = int(self._config["vocab_size"])
        prompts: list[list[int]] = self._random.integers(FIRST_TOKEN, vocabulary, (count, tokens)).tolist()
        return prompts

    def _prefill(self, api: ServerAPI, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        """(the prompt's tokens per second until the answer with the first token, that token)."""
        tokens = len(prompts[0])
        started = time.perf_counter()
        answer = api.post("/generate", generate_body(prompts[0], 1))
        seconds = time.perf_counter() - started
        if (cached := answer["meta_info"]["cached_tokens"]) > CACHED_SHARE * tokens:
            raise RuntimeFault(f"{cached} of a prompt's {tokens} tokens came from the prefix cache")
        return tokens / seconds, [answer["output_ids"]]

    def _streams(self, api: ServerAPI, case: Case, prompts: list[list[int]], new_tokens: int) -> list[Stream]:
        adapters: Sequence[str | None] = self._adapters[: case.size] if case.adapters else [None] * case.size
        return decode(api.url, prompts, new_tokens, adapters, TIMEOUT_S)


def _token_times(runs: Sequence[Run]) -> list[TokenTime]:
    """Empty if a run has none."""
    found = [run.token_time for run in runs if run.token_time is not None]
    return found if len(found) == len(runs) else []
