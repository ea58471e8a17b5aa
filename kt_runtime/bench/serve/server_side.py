"""kt-runtime's side: a server started as users start it, measured by its HTTP clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kt_runtime.bench.serve.adapters import load_adapters
from kt_runtime.bench.serve.plan import DECODE, PREFILL, Case, Plan
from kt_runtime.bench.serve.rows import Measured
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
    """Measures the cases in their order; adapters are loaded before the first case that has them."""

    def __init__(
        self, plan: Plan, cases: list[Case], config: Mapping[str, Any], dtype: str, say: Callable[[str], None]
    ) -> None:
        self._plan, self._cases, self._config, self._dtype, self._say = plan, cases, config, dtype, say
        self._random = np.random.default_rng(0)
        self._adapters: list[str] = []

    def measure(self, model: Path, directory: Path) -> Measurements:
        """`directory`: for the server's files. The server has ended on return."""
        options = [text for name, value in self._settings().items() for text in (f"--{name}", str(value))]
        options += ["--adapter-dir", str(directory / "adapters")]
        self._say(f"starting a server in {self._dtype}")
        found: Measurements = {}
        with server(str(model), options, directory / "server.log") as started:
            api = ServerAPI(started.url, timeout_s=TIMEOUT_S)
            for case in self._cases:
                if case.adapters and not self._adapters:
                    self._load_adapters(api, directory)
                found[case] = self._measure(api, case)
                self._say(f"{case}: {found[case][0].tokens_per_s:.1f} tokens/s")
        return found

    def _settings(self) -> dict[str, Any]:
        made = settings(self._plan, self._cases, self._dtype)
        return {name.replace("_", "-"): value for name, value in made.items()}

    def _load_adapters(self, api: ServerAPI, directory: Path) -> None:
        count = self._plan.most_streams(self._cases, adapters=True)
        self._say(f"loading {count} adapters of rank {self._plan.rank}")
        self._adapters = load_adapters(api, self._config, self._plan.rank, count, directory)

    def _measure(self, api: ServerAPI, case: Case) -> tuple[Measured, Transcript]:
        """One uncounted run, then the counted ones, each with prompts of its own, which no cache has."""
        self._warm_up(api, case)
        rates, prompts, answers = [], [], []
        for _ in range(self._plan.runs):
            rate, prompt, answer = self._run(api, case)
            rates.append(rate)
            prompts.append(prompt)
            answers.append(answer)
        return Measured(rates), Transcript(prompts, answers)

    def _run(self, api: ServerAPI, case: Case) -> tuple[float, list[list[int]], list[list[int]]]:
        """(tokens per second, prompts, answers). Raises RuntimeFault if streams do not decode at the same time, though
        run ATTEMPTS times."""
        if case.kind == PREFILL:
            prompts = self._prompts(case)
            rate, answers = self._prefill(api, prompts)
            return rate, prompts, answers
        for _ in range(ATTEMPTS):
            prompts = self._prompts(case)
            streams = self._streams(api, case, prompts, self._plan.new_tokens)
            if (common := tokens_per_s(streams)) is not None:
                return common, prompts, [stream.answer for stream in streams]
            self._say(f"{case}: the streams hardly decoded at the same time")
        raise RuntimeFault(
            f"{case}: in {ATTEMPTS} runs the streams hardly decoded at the same time; ask for more --new-tokens"
        )

    def _warm_up(self, api: ServerAPI, case: Case) -> None:
        prompts = self._prompts(case)
        if case.kind == PREFILL:
            self._prefill(api, prompts)
        else:
            self._streams(api, case, prompts, WARM_UP_TOKENS)

    def _prompts(self, case: Case) -> list[list[int]]:
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
