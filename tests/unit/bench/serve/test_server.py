"""`bench serve`'s servers, faked: which cases they measure, what ends a case, and the one without the native step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.bench.serve import server_side
from kt_runtime.bench.serve.no_step import NoStep, same_share
from kt_runtime.bench.serve.plan import DECODE, PREFILL, Case, Plan
from kt_runtime.bench.serve.server_side import WARM_UP_TOKENS, ServerSide, Transcript
from kt_runtime.bench.serve.streams import Stream
from kt_runtime.errors import RuntimeFault, ServerUnreachableError
from kt_runtime.serve.models.presets import load_preset

QWEN = load_preset("bench-qwen3-moe").config
PLAN = Plan(prefill=(8,), streams=(1, 2), prompt_tokens=4, new_tokens=8, runs=2)
PROMPT, ONE, TWO = Case(PREFILL, 8), Case(DECODE, 1), Case(DECODE, 2)
BASE = [PROMPT, ONE, TWO]
ADAPTED = [Case(DECODE, count, adapters=True) for count in (1, 2)]
REASON = "in 3 attempts at the next one the streams hardly decoded at the same time; ask for more --new-tokens"


def same(expected: list[float]) -> Any:
    """Equal but for the rounding of a few float64 operations: 2.2e-16 was measured."""
    return pytest.approx(expected, rel=1e-15, abs=0)


class Servers:
    """Takes the place of a server and its clients. A token of one stream takes 20 ms: the native step 15 ms, the head 2
    ms, sampling 1 ms. A batch of two takes as long.

    `options`: of each server that was started. `runs`, `prefilled`: prompts of the decoding runs without warm-ups, and
    of the prefills. `adapted`: whether a decoding run had adapters. Runs whose number (the first is 1) is in `apart`
    have streams one after the other; the server ends in run `dies_at`. `step`: state of the native step. `skipped`:
    decode batches of a run that the step leaves to SGLang's modules. `start_error`: of the second server. `scored`:
    prompts whose log-probabilities were asked for.
    """

    url = "http://127.0.0.1:9"

    def __init__(self) -> None:
        self.options: list[list[str]] = []
        self.runs: list[list[list[int]]] = []
        self.adapted: list[bool] = []
        self.prefilled: list[list[int]] = []
        self.apart: set[int] = set()
        self.step = "running"
        self.skipped = 0
        self.dies_at: int | None = None
        self.start_error: Exception | None = None
        self.scored: list[list[int]] = []
        self._batches = self._tokens = 0
        self._is_running = False

    @contextmanager
    def server(self, model: str, options: list[str], log: Path) -> Iterator[SimpleNamespace]:
        assert not self._is_running, "two servers at the same time"
        if self.options and self.start_error is not None:
            raise self.start_error
        self.options.append(options)
        self._is_running = True
        try:
            yield SimpleNamespace(url=self.url)
        finally:
            self._is_running = False

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/kt/status"
        status: dict[str, Any] = {"step": self._state(), "sglang_version": "0.5.23", "dtype": "bfloat16"}
        status |= {"step_decode_tokens": self._tokens, "step_decode_seconds": 0.015 * self._batches}
        status |= {"head_decode_seconds": 0.002 * self._batches}
        return status | {"sampling_decode_seconds": 0.001 * self._batches}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/generate"
        if body.get("return_logprob"):
            self.scored.append(body["input_ids"])
            logprobs = [[None if at == 0 else -0.5 * at, token, None] for at, token in enumerate(body["input_ids"])]
            return {"meta_info": {"input_token_logprobs": logprobs}}
        self.prefilled.append(body["input_ids"])
        return {"meta_info": {"cached_tokens": 0}, "output_ids": [7]}

    def decode(
        self, url: str, prompts: list[list[int]], new_tokens: int, adapters: list[str | None], timeout_s: float
    ) -> list[Stream]:
        gap = 0.0
        if new_tokens != WARM_UP_TOKENS:
            self.runs.append(prompts)
            self.adapted.append(any(adapters))
            gap = 9.0 if len(self.runs) in self.apart else 0.0
        if len(self.runs) == self.dies_at:
            raise ServerUnreachableError("the server has ended")
        if self._state() == "running" and not any(adapters):
            self._batches += new_tokens - 1 - self.skipped
            self._tokens += len(prompts) * (new_tokens - 1 - self.skipped)
        return [
            Stream([(gap * number + 0.02 * at, 1 + at) for at in range(new_tokens)], [prompt[0]] * new_tokens)
            for number, prompt in enumerate(prompts)
        ]

    def _state(self) -> str:
        return "--no-step" if "--no-step" in self.options[-1] else self.step


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(server_side, "server", made.server)
    monkeypatch.setattr(server_side, "ServerAPI", lambda url, timeout_s: made)
    monkeypatch.setattr(server_side, "decode", made.decode)
    monkeypatch.setattr(server_side, "load_adapters", lambda *args: [f"adapter-{n}" for n in range(args[3])])
    return made


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def first(servers: Servers, said: list[str]) -> ServerSide:
    return ServerSide(PLAN, PLAN.cases(QWEN), QWEN, "bfloat16", said.append)


def test_every_case_has_its_runs_each_with_prompts_of_its_own(
    servers: Servers, first: ServerSide, tmp_path: Path
) -> None:
    found = first.measure(tmp_path, tmp_path)
    assert list(found.measured) == [*BASE, *ADAPTED] and found.problems == {}
    assert all(len(measured.rates) == 2 for measured, _ in found.measured.values())
    assert found.measured[TWO][0].rates == same([100.0, 100.0])
    assert found.measured[TWO][1].prompts == servers.runs[2:4]
    prompts = [prompt for run in servers.runs for prompt in run]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 2 * (1 + 2 + 1 + 2)
    assert "--no-step" not in servers.options[0]


def test_a_run_whose_streams_hardly_decode_at_the_same_time_is_repeated(
    servers: Servers, first: ServerSide, said: list[str], tmp_path: Path
) -> None:
    """A busy machine gave the client no time, so that it read one stream after the other: twice."""
    servers.apart = {3, 4}
    found = first.measure(tmp_path, tmp_path)
    assert len(found.measured[TWO][0].rates) == 2 and found.problems == {}
    assert found.measured[TWO][1].prompts == servers.runs[4:6]
    assert said.count(f"{TWO}: the streams hardly decoded at the same time") == 2


def test_streams_that_never_decode_at_the_same_time_end_their_case_only(
    servers: Servers, first: ServerSide, said: list[str], tmp_path: Path
) -> None:
    servers.apart = {3, 4, 5}
    found = first.measure(tmp_path, tmp_path)
    assert list(found.measured) == [PROMPT, ONE, *ADAPTED]
    assert found.problems == {TWO: f"0 of 2 runs were measured: {REASON}"}
    assert f"{TWO}: {found.problems[TWO]}" in said


def test_the_runs_before_such_streams_are_kept(servers: Servers, first: ServerSide, tmp_path: Path) -> None:
    servers.apart = {4, 5, 6}
    found = first.measure(tmp_path, tmp_path)
    assert list(found.measured) == [*BASE, *ADAPTED]
    assert found.measured[TWO][0].rates == same([100.0])
    assert found.measured[TWO][1].prompts == servers.runs[2:3]
    assert found.problems == {TWO: f"1 of 2 runs were measured: {REASON}"}


def test_the_step_is_timed_where_it_computes_every_token_of_the_base(
    servers: Servers, first: ServerSide, tmp_path: Path
) -> None:
    found = first.measure(tmp_path, tmp_path)
    for case in (ONE, TWO):
        times = found.measured[case][0].token_times
        assert [each.step for each in times] == same([0.015, 0.015])
        assert [each.head for each in times] == same([0.002, 0.002])
        assert [each.sampling for each in times] == same([0.001, 0.001])
    assert all(measured.token_times == [] for case, (measured, _) in found.measured.items() if case not in (ONE, TWO))


def test_the_first_server_is_asked_for_log_probabilities_of_prompts_that_no_case_has(
    servers: Servers, first: ServerSide, tmp_path: Path
) -> None:
    found = first.measure(tmp_path, tmp_path)
    assert found.scores.prompts == servers.scored and len(servers.scored) == 4
    assert found.scores.logprobs == [[-0.5, -1.0, -1.5]] * 4
    assert not {tuple(prompt) for prompt in servers.scored} & {tuple(prompt) for prompt in servers.prefilled}
    NoStep(lambda _: None).measure(first, tmp_path, tmp_path / "no-step")
    assert len(servers.scored) == 4


@pytest.mark.parametrize(("step", "skipped"), [("running", 1), ("the family has no table", 0)])
def test_a_token_that_the_step_did_not_compute_leaves_its_time_unknown(
    servers: Servers, first: ServerSide, tmp_path: Path, step: str, skipped: int
) -> None:
    servers.step, servers.skipped = step, skipped
    found = first.measure(tmp_path, tmp_path)
    assert found.measured[ONE][0].token_times == [] and len(found.measured[ONE][0].rates) == 2


def test_the_peer_is_the_same_server_with_no_step_on_the_same_prompts(
    servers: Servers, first: ServerSide, said: list[str], tmp_path: Path
) -> None:
    first.measure(tmp_path, tmp_path)
    peer = NoStep(said.append)
    peer.measure(first, tmp_path, tmp_path / "no-step")
    with_step, without = servers.options
    assert with_step[-2:] == ["--adapter-dir", str(tmp_path / "adapters")]
    assert without == [*with_step[:-1], str(tmp_path / "no-step" / "adapters"), "--no-step"]
    assert list(peer.measured) == [*BASE, *ADAPTED]
    assert servers.runs[8:] == servers.runs[:8], "4 runs of the base, 4 with adapters, then the peer's"
    assert servers.adapted[8:] == servers.adapted[:8] == [False] * 4 + [True] * 4
    assert servers.prefilled[4:] == servers.prefilled[1:3]
    assert servers.prefilled[3] not in servers.prefilled[:3], "a warm-up must not fill the cache for a run"
    assert all(measured.same_tokens == 1 for measured in peer.measured.values())
    assert peer.measured[ONE].rates == same([50.0, 50.0]) and peer.measured[ONE].token_times == []
    facts = {"sglang_version": "0.5.23", "dtype": "bfloat16", "step": "--no-step"}
    assert peer.as_json() == facts | {"problem": None}
    assert "sglang_no_step: starting a server in bfloat16" in said


def test_a_server_that_runs_no_step_needs_no_second_one(
    servers: Servers, first: ServerSide, said: list[str], tmp_path: Path
) -> None:
    servers.step = "the family deepseek_v3 has no table of its decoder stack"
    first.measure(tmp_path, tmp_path)
    peer = NoStep(said.append)
    peer.measure(first, tmp_path, tmp_path / "no-step")
    assert peer.problem == f"not measured: the server runs no native step either ({servers.step})"
    assert said[-1] == f"sglang_no_step: {peer.problem}"
    assert len(servers.options) == 1 and peer.measured == {}


def test_a_second_server_that_does_not_start_is_the_peer_s_problem(
    servers: Servers, first: ServerSide, tmp_path: Path
) -> None:
    first.measure(tmp_path, tmp_path)
    servers.start_error = RuntimeFault("the server ended with status 1; server.log ends:\nTraceback\nno memory")
    peer = NoStep(lambda _: None)
    peer.measure(first, tmp_path, tmp_path / "no-step")
    assert peer.problem == "the server ended with status 1; server.log ends: no memory" and peer.measured == {}


def test_a_second_server_that_ends_leaves_what_it_was_measured_at(
    servers: Servers, first: ServerSide, tmp_path: Path
) -> None:
    first.measure(tmp_path, tmp_path)
    servers.dies_at = len(servers.runs) + 1
    peer = NoStep(lambda _: None)
    peer.measure(first, tmp_path, tmp_path / "no-step")
    assert peer.problem == "the server has ended" and list(peer.measured) == [PROMPT]


def test_a_case_that_the_peer_could_not_measure_is_its_problem(
    servers: Servers, first: ServerSide, tmp_path: Path
) -> None:
    first.measure(tmp_path, tmp_path)
    servers.apart = {len(servers.runs) + number for number in (3, 4, 5)}
    peer = NoStep(lambda _: None)
    peer.measure(first, tmp_path, tmp_path / "no-step")
    assert peer.problem == f"{TWO}: 0 of 2 runs were measured: {REASON}"
    assert list(peer.measured) == [PROMPT, ONE, *ADAPTED]


def test_the_share_of_equal_tokens_is_that_of_the_runs_of_both() -> None:
    ours = Transcript([[[1]]], [[[1, 2, 3, 4]]])
    theirs = Transcript([[[1]], [[1]]], [[[1, 2, 9, 4]], [[5, 5, 5, 5]]])
    assert same_share(ours, theirs) == 0.75
