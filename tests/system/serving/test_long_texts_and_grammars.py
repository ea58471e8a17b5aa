"""Texts and grammars that blocked a server for seconds or filled its memory, sent to a real one during a stream.

Each request here must be answered, the stream must get the tokens of a quiet run, and the scheduler's memory must come
back. Before there were limits such a text was tokenized in the event loop, and the grammars kept a
core busy after their clients had gone.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from system.conftest import Served
from system.forked_server import frontend_of

from kt_runtime.sglang_patch.grammar.allowance import GrammarLimits

WAIT_SECONDS = 300
BUSY_SECONDS = 240  # other tests may keep both cores busy for minutes
MEMORY_SLACK_BYTES = 256 << 20  # of the scheduler, beside what its own pools take while it answers
STREAM_TOKENS = 200
PROMPT = [5, 6, 7, 8, 9]
JSON = {"content-type": "application/json"}
LONG_TEXT = 480_000  # characters; the rules of requests let pass what is estimated at 64 contexts of tokens

PROPERTIES = {f"p{i}": {"type": "string", "pattern": "[a-z]{1,40}"} for i in range(900)}
COSTLY: dict[str, tuple[str, str]] = {
    "deep": ("json_schema", '{"properties":{"a":' * 900 + "{}" + "}}" * 900),
    "wide": ("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(2_500)}})),
    "wide within the limits": ("json_schema", json.dumps({"type": "object", "properties": PROPERTIES})),
    "itself": ("json_schema", '{"$ref":"#"}'),
    "many stars": ("regex", "[a-z]*" * 10_000),
    "repetition": ("regex", "(a{1000}){1000}"),
    "slow to match": ("ebnf", 'root ::= ("a"? "b"? "c"? [a-z]?){0,500} "!"'),
    "some of all properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": PROPERTIES, "minProperties": 400, "maxProperties": 450}),
    ),
}


@pytest.fixture(scope="module")
def url(float32_server: Served) -> str:
    return str(float32_server.api.url)


@pytest.fixture(scope="module")
def scheduler(float32_server: Served) -> psutil.Process:
    children = frontend_of(float32_server.model_directory).children()
    return next(child for child in children if "scheduler" in child.name() + " ".join(child.cmdline()))


def stream(url: str, first_token: threading.Event | None = None) -> list[int]:
    body = {
        "input_ids": PROMPT,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": STREAM_TOKENS, "ignore_eos": True},
    }
    tokens: list[int] = []
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=WAIT_SECONDS) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                tokens = event["output_ids"] if len(event["output_ids"]) > len(tokens) else tokens
                if first_token is not None:
                    first_token.set()
    return tokens


@pytest.fixture(scope="module")
def quiet(url: str) -> list[int]:
    tokens = stream(url)
    assert len(tokens) == STREAM_TOKENS
    return tokens


@pytest.fixture
def streaming(url: str, quiet: list[int]) -> Iterator[None]:
    """A stream continues during the test, and gets the same tokens as one alone."""
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, url, begun)
        assert begun.wait(WAIT_SECONDS)
        yield
        assert running.result(WAIT_SECONDS) == quiet


def generate(url: str, **sampling: Any) -> httpx.Response:
    params = {"temperature": 0, "max_new_tokens": 48, **sampling}
    return httpx.post(f"{url}/generate", json={"input_ids": PROMPT, "sampling_params": params}, timeout=WAIT_SECONDS)


def served_model(url: str) -> str:
    name: str = httpx.get(f"{url}/v1/models", timeout=WAIT_SECONDS).json()["data"][0]["id"]
    return name


def test_costly_grammars_are_answered_while_a_stream_continues_and_memory_comes_back(
    url: str, streaming: None, scheduler: psutil.Process
) -> None:
    generate(url, regex="[a-c]{3}")
    before = scheduler.memory_info().rss
    with ThreadPoolExecutor(len(COSTLY)) as pool:
        answers = dict(
            zip(COSTLY, pool.map(lambda case: generate(url, **{case[0]: case[1]}), COSTLY.values()), strict=True)
        )
    assert {answer.status_code for answer in answers.values()} <= {200, 400}
    for name in ("deep", "wide", "itself", "repetition", "slow to match"):
        assert answers[name].status_code == 400, name
        assert answers[name].json()["error"]["message"], name
    assert generate(url, regex="[a-c]{3}").status_code == 200
    assert scheduler.memory_info().rss < before + MEMORY_SLACK_BYTES


def test_a_grammar_that_becomes_slow_ends_its_own_request_only(url: str, streaming: None) -> None:
    hidden = 'root ::= [d-y]{200} | "z!" slow\nslow ::= ("a"? "b"? "c"? [a-z]?){0,500} "!"'
    served = served_model(url)
    (z,) = httpx.post(f"{url}/tokenize", json={"model": served, "prompt": "z"}, timeout=WAIT_SECONDS).json()["tokens"]
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        answer = generate(url, ebnf=hidden, logit_bias={str(z): 1e6})
        assert answer.status_code == 400
        if "while others waited" not in answer.text or time.monotonic() > deadline:
            break
        # Other programs or earlier grammars had the processor: this grammar was ended before its own limit.
        time.sleep(2 * GrammarLimits.step_s)
    assert "matching the grammar took more time or memory than allowed" in answer.text
    again = generate(url, ebnf=hidden)
    assert again.status_code == 400
    assert "matching it took more time or memory than allowed" in again.text
    assert generate(url, regex="[a-c]{3}").status_code == 200


def test_many_grammars_that_become_slow_at_once_end_and_a_quick_one_beside_them_does_not(
    url: str, streaming: None
) -> None:
    """Asked one after the other, each of them would hold the stream up for its own limit."""
    served = served_model(url)
    (z,) = httpx.post(f"{url}/tokenize", json={"model": served, "prompt": "z"}, timeout=WAIT_SECONDS).json()["tokens"]
    optional = 'root ::= [d-y]{200} | "z!" slow\nslow ::= ("a"? "b"? "c"? [a-z]?){0,%d} "!"'
    hidden = [optional % (501 + number) for number in range(12)]
    with ThreadPoolExecutor(len(hidden) + 1) as pool:
        quick = pool.submit(generate, url, regex="[a-c]{48}")
        answers = list(pool.map(lambda ebnf: generate(url, ebnf=ebnf, logit_bias={str(z): 1e6}), hidden))
    assert {answer.status_code for answer in answers} == {400}
    reasons = [answer.json()["error"]["message"] for answer in answers]
    assert all("matching the grammar took" in reason for reason in reasons), reasons
    assert re.fullmatch("[a-c]{48}", quick.result().json()["text"])


def test_a_refused_grammar_is_not_logged_whole(url: str, float32_server: Served) -> None:
    begun = float32_server.log.stat().st_size
    assert generate(url, regex="(" + "b" * 60_000).status_code == 400
    with float32_server.log.open("rb") as log:
        log.seek(begun)
        assert max(map(len, log)) < 2_000


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", {"text": ...}),
        ("/v1/completions", {"prompt": ...}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ...}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": ...}], "max_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": ...}], "max_tokens": 4, "stream": True}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": ...}]}),
        ("/v1/responses", {"input": ...}),
        ("/tokenize", {"prompt": ...}),
    ],
)
def test_a_long_text_is_refused_by_its_length(url: str, streaming: None, route: str, body: dict[str, Any]) -> None:
    text = json.dumps("the sea " * (LONG_TEXT // 8))
    served = served_model(url)
    body = body if route == "/generate" else {"model": served, **body}
    content = json.dumps(body, default=lambda _: "...").replace('"..."', text)
    answer = httpx.post(url + route, content=content, headers=JSON, timeout=WAIT_SECONDS)
    assert answer.status_code == 400, answer.text[:300]
    assert re.search(r"the text has 480,\d\d\d characters; at most [\d,]+ can fit", answer.text)


def test_routes_that_work_in_threads_answer_as_before(url: str) -> None:
    served = served_model(url)

    def post(route: str, **body: Any) -> Any:
        answer = httpx.post(url + route, json={"model": served, **body}, timeout=WAIT_SECONDS)
        assert answer.status_code == 200, answer.text[:300]
        return answer.json()

    text = "The sea at Saltmere."
    tokens = post("/tokenize", prompt=text)["tokens"]
    assert post("/detokenize", tokens=tokens)["text"] == text
    messages = [{"role": "user", "content": text}]
    counted = post("/v1/messages/count_tokens", messages=messages)["input_tokens"]
    answered = post("/v1/messages", messages=messages, max_tokens=4)
    assert counted == answered["usage"]["input_tokens"] > len(tokens)
    chat = post("/v1/chat/completions", messages=messages, max_tokens=4, temperature=0)
    assert chat["usage"]["prompt_tokens"] == counted
    assert post("/v1/responses", input=text, max_output_tokens=16)["usage"]["input_tokens"] == counted
    many = {"tokens": [random.Random(1).randrange(3, 700) for _ in range(9_000)], "model": served}
    refused = httpx.post(f"{url}/detokenize", json=many, timeout=WAIT_SECONDS)
    assert refused.status_code == 400
    assert "9,000 tokens; allowed are 8,192" in refused.text


def test_grammars_in_use_hold(url: str) -> None:
    for _ in range(2):  # compiled, then found
        assert re.fullmatch(r"[a-c]{3}-\d{2}", generate(url, regex=r"[a-c]{3}-\d{2}").json()["text"])
        assert generate(url, ebnf='root ::= "yes" | "no"').json()["text"] in ("yes", "no")
    schema = {"type": "string", "enum": ["x", "y"]}
    assert generate(url, json_schema=json.dumps(schema)).json()["text"] in ('"x"', '"y"')
    chat = {
        "model": served_model(url),
        "messages": [{"role": "user", "content": "x or y?"}],
        "max_tokens": 8,
        "response_format": {"type": "json_schema", "json_schema": {"name": "letter", "schema": schema}},
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=WAIT_SECONDS).json()
    assert answer["choices"][0]["message"]["content"] in ('"x"', '"y"')
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<f>", "content": {"type": "regex", "pattern": "[ab]{2}"}, "end": "</f>"},
    }
    assert re.fullmatch("<f>[ab]{2}</f>", generate(url, structural_tag=json.dumps(tag)).json()["text"])


def test_many_requests_with_one_new_grammar_are_all_answered(url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: generate(url, regex="[d-f]{5}").json()["text"], range(8)))
    assert len(set(answers)) == 1
    assert re.fullmatch("[d-f]{5}", answers[0])


def test_log_probabilities_of_a_long_prompt_are_bounded(url: str) -> None:
    body = {
        "input_ids": [5] * 2000,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 700,
        "sampling_params": {"max_new_tokens": 1},
    }
    answer = httpx.post(f"{url}/generate", json=body, timeout=WAIT_SECONDS)
    assert answer.status_code == 400
    assert "at each of 2,000 positions of the prompt are 1,402,000; allowed are 1,000,000" in answer.text
