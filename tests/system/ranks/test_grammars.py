"""Structured output of two ranks: the answers and refusals of one, and nobody waits for a grammar but its requests.

Rank 0 has the grammars' processes. The tests stop and kill real ones.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from reference.server.greedy import ask, given_logprobs
from system.forked_server import frontend_of

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model

SECONDS = 300.0
PROMPTS = ([5, 6, 7], list(range(3, 60)))
SCHEMA: dict[str, Any] = {"enum": ["sea", {"name": "Ada", "age": 36}, [1, 2, 3], 4.5]}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<f>", "content": {"type": "regex", "pattern": "[ab]{2}"}, "end": "</f>"},
}
GRAMMARS = {
    "regex": r"[a-c]{3}-\d{2}",
    "ebnf": 'root ::= "yes" | "no" " " [a-z]{1,9}',
    "json_schema": json.dumps(SCHEMA),
    "structural_tag": json.dumps(TAG),
}
REFUSED = {
    "json_schema": '{"type": "nothing"}',
    "regex": "(",
    "ebnf": "root ::= missing",
    "structural_tag": '{"type":"structural_tag","format":{"type":"nothing"}}',
}
FORKER = "kt_runtime.sglang_patch.grammar.process"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("grammars")
    make_model("tiny-qwen3-moe", directory / "model", seed=6)
    return directory


@contextlib.contextmanager
def running(directory: Path, ranks: int) -> Iterator[ServerAPI]:
    options = ["--tp-size", str(ranks), "--expert-threads", "1", "--adapter-dir", str(directory / f"{ranks}-adapters")]
    with server(str(directory / "model"), options, directory / f"{ranks}.log") as api:
        yield api


@pytest.fixture(scope="module")
def of_one_rank(directory: Path) -> tuple[Any, Any]:
    with running(directory, 1) as api:
        return answers_of(api), refusals_of(api)


@pytest.fixture(scope="module")
def ranks(directory: Path, of_one_rank: Any) -> Iterator[ServerAPI]:
    with running(directory, 2) as api:
        yield api


def generate(api: ServerAPI, prompt: list[int], **sampling: Any) -> httpx.Response:
    """Asks again where other programs had the processors, so that the grammar was ended for its slowness."""
    params = {"temperature": 0, "max_new_tokens": 40, **sampling}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    deadline = time.monotonic() + SECONDS
    while True:
        answer = httpx.post(f"{api.url}/generate", json=body, timeout=SECONDS, trust_env=False)
        if answer.status_code == 200 or not is_busy(answer.text) or time.monotonic() > deadline:
            return answer
        time.sleep(1.0)


def is_busy(reason: str) -> bool:
    return any(each in reason for each in ("while others waited", "try again later", "can't answer now"))


def answers_of(api: ServerAPI) -> list[Any]:
    """Text, tokens and log-probabilities: of one request after the other, of grammars that are known, of all at once
    beside requests without a grammar."""
    asked = [(prompt, {kind: spec}) for kind, spec in GRAMMARS.items() for prompt in PROMPTS]
    given = [generate(api, prompt, **grammar) for _ in range(2) for prompt, grammar in asked]
    with ThreadPoolExecutor(16) as pool:
        free = [pool.submit(ask, api, prompt) for prompt in PROMPTS]
        given += pool.map(lambda one: generate(api, one[0], **one[1]), asked)
        beside = [each.result() for each in free]
    assert [answer.status_code for answer in given] == [200] * len(given), [each.text for each in given]
    found = [answer.json() for answer in given]
    return [*beside, *((one["text"], one["output_ids"], given_logprobs(one)) for one in found)]


def refusals_of(api: ServerAPI) -> list[Any]:
    given = [generate(api, PROMPTS[0], **{kind: spec}) for _ in range(2) for kind, spec in REFUSED.items()]
    assert {answer.status_code for answer in given} == {400}
    return [answer.json()["error"]["message"] for answer in given]


def test_answers_and_refusals_are_those_of_one_rank_bit_by_bit(ranks: ServerAPI, of_one_rank: Any) -> None:
    answers, refusals = of_one_rank
    assert answers_of(ranks) == answers
    assert refusals_of(ranks) == refusals
    by_kind = {kind: answers[2 + 2 * place][0] for place, kind in enumerate(GRAMMARS)}
    assert re.fullmatch(GRAMMARS["regex"], by_kind["regex"])
    assert re.fullmatch("<f>[ab]{2}</f>", by_kind["structural_tag"])
    assert json.loads(by_kind["json_schema"]) in SCHEMA["enum"]


def test_sampled_tokens_follow_the_grammar(ranks: ServerAPI) -> None:
    with ThreadPoolExecutor(8) as pool:
        given = list(pool.map(lambda _: generate(ranks, [5], temperature=1.0, regex="[d-k]{24}"), range(8)))
    texts = [answer.json()["text"] for answer in given]
    assert all(re.fullmatch("[d-k]{24}", text) for text in texts)
    assert len(set(texts)) > 1


def test_a_grammar_that_is_not_compiled_yet_holds_up_its_own_requests_only(directory: Path, ranks: ServerAPI) -> None:
    generate(ranks, [5], regex="z")  # so that there is a process that starts grammars
    expected = ask(ranks, PROMPTS[1])
    with ThreadPoolExecutor(2) as pool, stopped(forker_of(directory)):
        waiting = pool.submit(generate, ranks, [5], regex="[f-h]{4}")
        gone = pool.submit(leave_soon, ranks, "[f-h]{5}")
        until(lambda: ranks.get("/kt/status")["requests_in_flight"] == 2)
        assert ask(ranks, PROMPTS[1]) == expected
        gone.result(SECONDS)
        until(lambda: ranks.get("/kt/status")["requests_in_flight"] == 1)
        assert ask(ranks, PROMPTS[1]) == expected
        assert not waiting.done()
    assert re.fullmatch("[f-h]{4}", waiting.result(SECONDS).json()["text"])


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        (signal.SIGKILL, 400, "took more time or memory than allowed"),
        (signal.SIGSTOP, 503, "did not answer within 5 s"),
    ],
)
def test_a_grammars_process_that_dies_or_stops_ends_its_own_requests_only(
    directory: Path, ranks: ServerAPI, how: signal.Signals, status: int, reason: str
) -> None:
    expected = ask(ranks, PROMPTS[1])
    stream = Stream(ranks, f"[a-c]{{{3000 + status}}}")
    processes = forker_of(directory).children()
    for process in processes:
        process.send_signal(how)
    assert ask(ranks, PROMPTS[1]) == expected
    stream.thread.join(SECONDS)
    ended = json.loads(stream.lines[-2].removeprefix("data: "))["meta_info"]["finish_reason"]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # one of those that nothing was asked of is stopped still
    assert "while others waited" in ended["message"] or (ended["status_code"] == status and reason in ended["message"])
    new = f"[m-p]{{{how.value}}}"
    answer = generate(ranks, [5], regex=new)
    assert answer.status_code == 200 and re.fullmatch(new, answer.json()["text"]), answer.text


class Stream:
    """An answer with a grammar, after its first token. `lines`: what has arrived."""

    def __init__(self, api: ServerAPI, regex: str) -> None:
        self.lines: list[str] = []
        self.thread = threading.Thread(target=self._read, args=(api.url, regex), daemon=True)
        self.thread.start()
        until(lambda: bool(self.lines))

    def _read(self, url: str, regex: str) -> None:
        sampling = {"temperature": 0, "regex": regex, "max_new_tokens": 3000}
        body = {"input_ids": [5, 6], "stream": True, "sampling_params": sampling}
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=SECONDS, trust_env=False) as got:
            self.lines.extend(line for line in got.iter_lines() if line)


def leave_soon(api: ServerAPI, regex: str) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 8, "regex": regex}}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{api.url}/generate", json=body, timeout=httpx.Timeout(SECONDS, read=3.0), trust_env=False)


def forker_of(directory: Path) -> psutil.Process:
    """The process that starts grammars: there is one, of rank 0."""
    processes = frontend_of(directory / "model").children(recursive=True)
    (found,) = [each for each in processes if FORKER in each.cmdline() and FORKER not in each.parent().cmdline()]
    return found


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.05)
