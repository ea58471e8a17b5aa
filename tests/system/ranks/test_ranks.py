"""A real server of two ranks against one of a single rank: the same tokens and log-probabilities, bit by bit, of the
base and of adapters; what each rank holds; and what happens when one of them dies or is stopped."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from reference import lora
from reference.server.greedy import Answer, ask
from system import forked_server

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.errors import KtError
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire.replies import STEP_RUNNING

SECONDS = 60.0
LENGTHS = (1, 2, 7, 33, 150, 400)  # in chunks of 64 tokens and pages of 8
ADAPTERS = {"all": (8, ()), "attention": (3, ("attention",)), "experts": (4, ("experts",))}
ONE_THREAD = ("--expert-threads", "1", "--max-lora-rank", "8")
PASSED_ON = ("--", "--chunked-prefill-size", "64", "--page-size", "8")


@dataclass(frozen=True)
class Case:
    """A server of two ranks, and how it ends: rank `rank` is "killed" or "stopped". `of_ranks`: options that one rank,
    which it is compared with, has not."""

    dtype: str
    expert_format: str | None
    of_ranks: tuple[str, ...]
    how: str
    rank: int

    @property
    def options(self) -> tuple[str, ...]:
        return ("--dtype", self.dtype, *(("--expert-format", self.expert_format) if self.expert_format else ()))

    @property
    def name(self) -> str:
        return "-".join((self.dtype, str(self.expert_format), *self.of_ranks))


CASES = [
    Case("bfloat16", None, (), "killed", 0),
    Case("bfloat16", None, ("--no-step",), "stopped", 0),
    Case("float32", None, (), "stopped", 1),
    Case("bfloat16", "int8", (), "killed", 1),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and adapters of all its modules, of attention, of experts."""
    directory = tmp_path_factory.mktemp("ranks")
    make_model("tiny-qwen3-moe", directory / "model", seed=6)
    config = json.loads((directory / "model" / "config.json").read_text(encoding="utf-8"))
    for seed, (name, (rank, only)) in enumerate(ADAPTERS.items()):
        adapter = lora.random_adapter(config, rank=rank, alpha=12.0, seed=seed, only=only)
        lora.write_adapter(directory / name, adapter)
    return directory


@contextlib.contextmanager
def running(directory: Path, name: str, *options: str) -> Iterator[ServerAPI]:
    arguments = [*ONE_THREAD, "--adapter-dir", str(directory / f"{name}-adapters"), *options, *PASSED_ON]
    with server(str(directory / "model"), arguments, directory / f"{name}.log") as api:
        yield api


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 700, (length,), generator=generator).tolist() for length in LENGTHS]


def answers_of(api: ServerAPI, directory: Path) -> list[Answer]:
    """To prompts alone, together, with cached prefixes; of the base and of adapters beside it; of a name that moves."""
    given = [ask(api, prompt) for prompt in prompts()]
    for name in ADAPTERS:
        api.post("/kt/adapters", {"name": name, "path": str(directory / name)})
    names = (None, *ADAPTERS)
    with ThreadPoolExecutor(len(names) * len(LENGTHS)) as pool:
        asked = [pool.submit(ask, api, [5, *prompt], name) for prompt in prompts() for name in names]
        given += [each.result() for each in asked]
    api.post("/kt/adapters", {"name": "all", "path": str(directory / "experts"), "take_over": True})
    moved = ask(api, [5, *prompts()[3]], "all")
    api.post("/kt/adapters/all/rollback", {})
    back = ask(api, [5, *prompts()[3]], "all")
    assert moved != back
    given += [moved, back, ask(api, prompts()[-1][:300] + prompts()[-2])]
    for name in ADAPTERS:
        api.delete(f"/kt/adapters/{name}")
    return [*given, ask(api, prompts()[2])]


@pytest.fixture(scope="module")
def expected(directory: Path) -> Callable[[Case], tuple[list[Answer], dict[str, Any]]]:
    """What one rank answers, and its status, by the formats of weights."""

    @functools.cache
    def of(options: tuple[str, ...]) -> tuple[list[Answer], dict[str, Any]]:
        with running(directory, f"one{''.join(options)}", *options) as api:
            return answers_of(api, directory), api.get("/kt/status")

    return lambda case: of(case.options)


class Ranks:
    """The server of a case, which starts when a test asks for it, and again after its end."""

    def __init__(self, directory: Path, case: Case) -> None:
        self.case, self._directory, self._held = case, directory, contextlib.ExitStack()
        self._api: ServerAPI | None = None

    @property
    def api(self) -> ServerAPI:
        if self._api is None:
            options = ("--tp-size", "2", *self.case.of_ranks, *self.case.options)
            self._api = self._held.enter_context(running(self._directory, f"two-{self.case.name}", *options))
        return self._api

    def log(self) -> str:
        return (self._directory / f"two-{self.case.name}.log").read_text(errors="replace")

    def end(self) -> None:
        self._api = None
        self._held.close()


@pytest.fixture(scope="module", params=CASES, ids=[case.name for case in CASES])
def ranks(request: pytest.FixtureRequest, directory: Path) -> Iterator[Ranks]:
    """The tests of a case share it, the last of which ends it."""
    made = Ranks(directory, request.param)
    yield made
    made.end()


def test_two_ranks_answer_with_the_bits_of_one(
    directory: Path, ranks: Ranks, expected: Callable[[Case], tuple[list[Answer], dict[str, Any]]]
) -> None:
    answers, whole = expected(ranks.case)
    assert answers_of(ranks.api, directory) == answers
    status = ranks.api.get("/kt/status")
    assert_each_rank_holds_its_share(directory, status, whole)
    without_step = ranks.case.of_ranks
    assert (status["step"], status["step_exceptions"]) == (without_step[0] if without_step else STEP_RUNNING, [])
    assert "exchange through gloo" not in ranks.log()


@pytest.mark.parametrize("ranks", CASES[:1], indirect=True, ids=[CASES[0].name])
def test_ranks_stay_together_whatever_requests_do(directory: Path, ranks: Ranks) -> None:
    """Sampled tokens, clients that go away, numbers that are not finite on one rank."""
    api = ranks.api
    config = json.loads((directory / "model" / "config.json").read_text(encoding="utf-8"))
    lora.write_adapter(directory / "huge", lora.huge_adapter(config))
    with ThreadPoolExecutor(8) as pool:
        before = ask(api, prompts()[3])
        sampled: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 1.0}
        streams = [pool.submit(sample, api, [5, 6, each], **sampled) for each in range(3, 11)]
        leave_while_it_streams(api)
        assert [len(each.result().json()["output_ids"]) for each in streams] == [24] * 8
        api.post("/kt/adapters", {"name": "huge", "path": str(directory / "huge")})
        refused = sample(api, [5, 6, 7], adapter="huge", max_new_tokens=4)
        assert refused.status_code == 422 and "adapter 'huge' computed numbers that are not finite" in refused.text
        assert ask(api, prompts()[3]) == before
    api.delete("/kt/adapters/huge")


def sample(api: ServerAPI, prompt: list[int], adapter: str | None = None, **sampling: Any) -> httpx.Response:
    body = {"input_ids": prompt, "sampling_params": sampling, "lora_path": adapter}
    return httpx.post(f"{api.url}/generate", json=body, timeout=SECONDS, trust_env=False)


def leave_while_it_streams(api: ServerAPI) -> None:
    body = {"input_ids": [5, 6], "stream": True, "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
    with httpx.stream("POST", f"{api.url}/generate", json=body, timeout=SECONDS, trust_env=False) as answer:
        next(line for line in answer.iter_lines() if line)
    until(lambda: not api.get("/kt/status")["requests_in_flight"])


def assert_each_rank_holds_its_share(directory: Path, status: dict[str, Any], whole: dict[str, Any]) -> None:
    assert whole["ranks"] == []
    ranks = status["ranks"]
    assert [(each["rank"], each["first_expert"], each["num_experts"]) for each in ranks] == [(0, 0, 4), (1, 4, 4)]
    assert [each["expert_bytes"] for each in ranks] == [whole["expert_bytes"] // 2] * 2
    assert all(each["peak_bytes"] >= each["rss_bytes"] > 0 for each in ranks)
    assert len({each["pid"] for each in ranks}) == 2
    assert status["exact"] == (status["step"] == STEP_RUNNING)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.1)


class Stream:
    """An answer that is longer than any test. `error`: how it ended."""

    def __init__(self, api: ServerAPI) -> None:
        self.lines: list[str] = []
        self.error = ""
        self._thread = threading.Thread(target=self._read, args=(api.url,), daemon=True)
        self._thread.start()
        until(lambda: bool(self.lines))

    def _read(self, url: str) -> None:
        body = {"input_ids": [5, 6], "stream": True, "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
        try:
            with httpx.stream("POST", f"{url}/generate", json=body, timeout=SECONDS, trust_env=False) as got:
                self.lines.extend(line for line in got.iter_lines() if line)
        except httpx.TransportError as error:
            self.error = type(error).__name__

    def ended(self) -> bool:
        return not self._thread.is_alive()


def test_all_ranks_end_with_an_error_that_names_the_one_at_fault(directory: Path, ranks: Ranks) -> None:
    case, api = ranks.case, ranks.api
    frontend = forked_server.frontend_of(directory / "model")
    processes = [frontend, *frontend.children(recursive=True)]
    pid = api.get("/kt/status")["ranks"][case.rank]["pid"]
    stream = Stream(api)
    at_fault = psutil.Process(pid)
    at_fault.kill() if case.how == "killed" else at_fault.suspend()
    until(lambda: not any(has_not_ended(process) for process in processes))
    until(stream.ended)
    assert stream.error or '"status_code":503' in stream.lines[-2], stream.lines[-2:]
    ranks.end()
    expected = {"killed": "has died: SIGKILL", "stopped": "is stopped by a signal"}[case.how]
    assert f"rank {case.rank} (process {pid}) {expected}; the server ends" in ranks.log()


def has_not_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_number_that_does_not_divide_is_refused_at_once(directory: Path) -> None:
    with (
        pytest.raises(KtError, match="--tp-size 3: 4 attention heads can't be split evenly over 3 ranks"),
        running(directory, "refused", "--tp-size", "3"),
    ):
        pass
