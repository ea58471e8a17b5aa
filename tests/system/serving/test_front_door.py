"""What a real server answers to requests that it can not carry, and to those of usual clients.

Nothing here may end or freeze the server: it is shared with other modules.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from reference.server.request_bodies import BODIES, MESSAGES, NESTED, TOOL, WRONG, body_type_of, with_wrong_values
from system.conftest import Served

from kt_runtime.serve.http.route_table import RULES, Access, rule_for
from kt_runtime.serve.requests.bodies.sampling import SamplingParams
from kt_runtime.serve.requests.checks.checking import parsed
from kt_runtime.serve.requests.checks.prompts import check_prompts
from kt_runtime.serve.requests.checks.refusal import Refusal

PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
# What only a server's own files or its exceptions have.
LEAKS = ("site-packages", "Traceback", 'File "', "/kt_runtime/", "/sglang/")


pytestmark = pytest.mark.preset("tiny-qwen3-moe")  # the front door knows no families


@pytest.fixture
def served(float32_server: Served) -> Served:
    return float32_server


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.api.url, timeout=60.0, trust_env=False) as client:
        yield client


def base_name(client: httpx.Client) -> str:
    return str(client.get("/v1/models").json()["data"][0]["id"])


def tokens(client: httpx.Client) -> list[int]:
    answer = client.post("/generate", json={"input_ids": PROMPT, "sampling_params": GREEDY})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["output_ids"]
    return found


def generate(**fields: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, **fields}


def sampling(**fields: Any) -> dict[str, Any]:
    return generate(sampling_params={"max_new_tokens": 2, **fields})


# Each of these ended the scheduler or the server, froze it, or was answered with status 500.
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": [5], "custom_labels": {"a": "b"}}, "custom_labels"),
    ({"input_ids": [5], "positional_embed_overrides": [1]}, "positional_embed_overrides"),
    ({"input_ids": [5], "positional_embed_overrides": {}}, "positional_embed_overrides"),
    ({"input_ids": [5], "positional_embed_overrides": "x"}, "positional_embed_overrides"),
    (sampling(temperature=1, top_k=9223372036854775808), "top_k"),
    (sampling(n=2**31), "n"),
    (sampling(n=None), "n"),
    (sampling(max_new_tokens=2**63), "max_new_tokens"),
    (sampling(stream_interval=0), "stream_interval"),
    (sampling(is_normalized=True), "is_normalized"),
    (sampling(stop_regex="("), "stop_regex"),
    (sampling(regex="a" * 70_000), "regex"),
    (sampling(json_schema={"$ref": "#"}), "json_schema"),
    (sampling(logit_bias={"a": 1}), "logit_bias"),
    (sampling(stop=["x"] * 100), "stop"),
    (sampling(stop="x" * 100_000), "stop"),
    (generate(sampling_params=[]), "sampling_params"),
    (generate(top_logprobs_num=[5]), "top_logprobs_num"),
    (generate(return_logprob=[True]), "return_logprob"),
    (generate(rid=["a"]), "rid"),
    (generate(token_ids_logprob=[5, [6]]), "token_ids_logprob"),
    (generate(session_params={"x": 1}), "session_params"),
    (generate(session_params={"id": "x", "replace": True}), "replace"),
    (generate(priority=2**63), "priority"),
    ({"input_embeds": []}, "input_embeds"),
    ({"input_ids": [[5], 6]}, "input_ids"),
    ({"input_ids": [[5], []]}, "input_ids"),
    ({"text": "a", "input_ids": [5]}, "text"),
    ({"text": ["a"] * 1025}, "text"),
    (generate(temprature=1), "temprature"),
]


@pytest.mark.parametrize(("body", "field"), HOSTILE, ids=lambda value: value if isinstance(value, str) else "")
def test_hostile_body_is_refused_by_the_field_that_is_wrong(
    client: httpx.Client, body: dict[str, Any], field: str
) -> None:
    answer = client.post("/generate", json=body)
    assert answer.status_code == 400 and field in answer.json()["error"]["message"], answer.text
    assert len(answer.text) < 2000 and not any(leak in answer.text for leak in LEAKS)


def test_server_answers_the_same_after_all_of_them(client: httpx.Client) -> None:
    expected = tokens(client)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda case: client.post("/generate", json=case[0]), HOSTILE))
    assert tokens(client) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"text": NaN}',
        b'{"text": "\xff"}',
        b'{"text": "a", "text": "b"}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
    ids=["empty", "half", "no object", "NaN", "no UTF-8", "twice", "deep", "UTF-16"],
)
def test_body_that_is_no_plain_json_is_refused_in_the_format_of_each_api(client: httpx.Client, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ("/generate", "/v1/chat/completions", "/v1/responses"):
        answer = client.post(path, content=body, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["message"], path
    answer = client.post("/v1/messages", content=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["type"] == "error"


def test_every_generating_route_answers_its_small_body_and_names_a_field_that_it_does_not_know(
    client: httpx.Client,
) -> None:
    paths = {path for rule in RULES if rule.access is Access.GENERATE for path in [rule.path]}
    assert paths == BODIES.keys()
    for path, body in BODIES.items():
        answer = client.post(path, json=body)
        # The tiny models' tokenizer has no single tokens for the labels of decisions.
        expected = 400 if path == "/v1/decisions" else 200
        assert answer.status_code == expected, f"{path}: {answer.text[:500]}"
        answer = client.post(path, json={**body, "no_such_field": 1})
        assert answer.status_code == 400 and "no_such_field" in answer.text, path


def test_wrong_types_of_every_field_of_every_route_end_in_no_fault(client: httpx.Client, served: Served) -> None:
    """Only what our own check lets through is sent: the rest is refused by the same code on the server."""
    expected, sent = tokens(client), [*accepted_bodies()]
    assert len(sent) > 500

    def send(case: tuple[str, dict[str, Any]]) -> str | None:
        path, body = case
        answer = client.post(path, json=body)
        leaked = [leak for leak in LEAKS if leak in answer.text]
        wrong = answer.status_code not in (200, 400, 404) or leaked
        return f"{path} {json.dumps(body)[:300]}: {answer.status_code} {answer.text[:300]}" if wrong else None

    with ThreadPoolExecutor(8) as pool:
        faults = [fault for fault in pool.map(send, sent) if fault]
    assert not faults, "\n".join(faults[:40])
    assert tokens(client) == expected


def accepted_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    tried: set[type] = set()
    for path, body in BODIES.items():
        kind = body_type_of(path)
        if kind not in tried:
            tried.add(kind)
            for field in msgspec.structs.fields(kind):
                yield from only_accepted(path, ({**body, field.encode_name: value} for value in WRONG))
    for name in [field.encode_name for field in msgspec.structs.fields(SamplingParams)]:
        yield from only_accepted("/generate", (sampling(**{name: value}) for value in WRONG))
    for path, body in NESTED:
        yield from only_accepted(path, with_wrong_values(body))


def only_accepted(path: str, bodies: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((path, body) for body in bodies if not is_endless(body) and is_accepted(path, body))


def is_endless(body: dict[str, Any]) -> bool:
    """Answers of any length only take time: without a limit they end with the context."""
    inner = body.get("sampling_params")
    asked = {**body, **(inner if isinstance(inner, dict) else {})}
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
    return any(name in asked and not asked[name] for name in limits)


def is_accepted(path: str, body: dict[str, Any]) -> bool:
    try:
        check_prompts(parsed(json.dumps(body).encode(), body_type_of(path))[0])
    except Refusal:
        return False
    return True


def test_routes_that_the_server_has_are_all_in_the_table(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert len(paths) > 60
    for path, operations in paths.items():
        for method in (name.upper() for name in operations):
            rule = rule_for(method, path)
            assert rule is not None, f"{method} {path} has no rule"
            if rule.access is Access.REFUSED:
                answer = client.request(method, path.replace("{", "").replace("}", ""), json={})
                assert answer.status_code == 403 and rule.reason in answer.json()["error"]["message"], path


class TestBodySize:
    def test_declared_length_above_the_limit_is_refused_before_anything_is_sent(self, served: Served) -> None:
        connection = http.client.HTTPConnection(urlsplit(served.api.url).netloc, timeout=30)
        connection.putrequest("POST", "/generate")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(10**10))
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 413 and answer.getheader("connection") == "close"
        assert "--max-body-size" in json.loads(answer.read())["error"]["message"]
        connection.close()

    def test_chunked_body_above_the_limit_is_refused(self, client: httpx.Client, served: Served) -> None:
        def parts() -> Iterator[bytes]:
            yield b'{"text": "'
            for _ in range(64):
                yield b"x" * 65536
            yield b'"}'

        headers = {"Content-Type": "application/json"}
        for path in ("/generate", "/v1/completions", "/kt/adapters", "/flush_cache"):
            answer = client.post(path, content=parts(), headers=headers)
            assert answer.status_code == 413 and "error" in answer.json(), path
        assert len(tokens(client)) == 6


class TestNames:
    def test_unknown_model_is_404_with_the_nearest_name(self, client: httpx.Client) -> None:
        base = base_name(client)
        for path, body in BODIES.items():
            if not path.startswith("/v1") or path in ("/v1/tokenize", "/v1/detokenize"):
                continue
            answer = client.post(path, json={**body, "model": base[:-1]})
            assert answer.status_code == 404 and repr(base) in answer.text, f"{path}: {answer.text}"

    @pytest.mark.parametrize("stream", [False, True])
    def test_unknown_adapter_is_refused_before_a_stream_opens(self, client: httpx.Client, stream: bool) -> None:
        base = base_name(client)
        cases = [
            ("/generate", generate(lora_path="none", stream=stream)),
            ("/v1/completions", {**BODIES["/v1/completions"], "model": f"{base}:none", "stream": stream}),
            ("/v1/chat/completions", {**BODIES["/v1/chat/completions"], "lora_path": "none", "stream": stream}),
            ("/v1/messages", {**BODIES["/v1/messages"], "model": f"{base}:none", "stream": stream}),
        ]
        for path, body in cases:
            answer = client.post(path, json=body)
            assert answer.status_code == 404 and "unknown adapter 'none'" in answer.text, path

    def test_adapter_may_not_be_called_as_the_model(self, client: httpx.Client, served: Served) -> None:
        for name in (base_name(client), "default"):
            answer = client.post("/kt/adapters", json={"name": name, "path": str(served.model_directory)})
            assert (
                answer.status_code in (400, 409) and "mean the model" in answer.text
            ) or "adapter name" in answer.text


class TestWebPages:
    FOREIGN = (
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    )

    @pytest.mark.parametrize("headers", FOREIGN, ids=lambda headers: next(iter(headers)))
    def test_foreign_pages_get_no_answer_from_any_route(self, client: httpx.Client, headers: dict[str, str]) -> None:
        routes = [("GET", "/health"), ("GET", "/kt/status"), ("GET", "/flush_cache"), ("OPTIONS", "/generate")]
        for method, path in [*routes, *(("POST", path) for path in BODIES)]:
            answer = client.request(method, path, headers=headers, json=BODIES.get(path))
            assert answer.status_code == 403, f"{method} {path}"
            assert not [name for name in answer.headers if name.startswith("access-control")]

    def test_own_pages_are_answered_and_no_origin_is_reflected(self, client: httpx.Client, served: Served) -> None:
        answer = client.get("/kt/status", headers={"Origin": served.api.url, "Sec-Fetch-Site": "same-origin"})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]


class TestLogProbabilities:
    """Those of a chat were made as objects in the event loop: 35 s and 4 GB for 1,024 at each of 4,096 tokens."""

    def test_no_more_than_openai_allows_at_each_token_of_a_chat(self, client: httpx.Client) -> None:
        body = {"messages": MESSAGES, "max_tokens": 4096, "logprobs": True, "top_logprobs": 1024}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "top_logprobs", answer.text

    def test_a_chat_that_is_written_in_pieces_has_what_the_engine_gave(self, client: httpx.Client) -> None:
        asked = {"logprobs": True, "top_logprobs": 20, "return_meta_info": True}
        body = {"messages": MESSAGES, "max_tokens": 120, "ignore_eos": True, "n": 2, **asked}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and answer.headers["transfer-encoding"] == "chunked", answer.text[:500]
        assert answer.headers["content-type"] == "application/json"
        for choice in answer.json()["choices"]:
            written, given = choice["logprobs"]["content"], choice["meta_info"]
            assert [one["logprob"] for one in written] == [one[0] for one in given["output_token_logprobs"]]
            assert [[one["logprob"] for one in row["top_logprobs"]] for row in written] == [
                [one[0] for one in row] for row in given["output_top_logprobs"]
            ]
            assert len(written) == 120 and all(len(row["top_logprobs"]) == 20 for row in written)

    def test_an_answer_that_has_too_many_ends_alone(self, client: httpx.Client) -> None:
        """It does not say how many tokens it wants; each chunk of its stream would send all of them again."""
        sampling_params = {"max_new_tokens": None, "ignore_eos": True, "stream_interval": 400, "temperature": 0}
        body = generate(return_logprob=True, top_logprobs_num=760, stream=True, sampling_params=sampling_params)
        reasons = []
        with client.stream("POST", "/generate", json=body) as lines:
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    reasons.append(json.loads(line.removeprefix("data: "))["meta_info"]["finish_reason"])
        assert reasons[-1]["status_code"] == 400 and "761 log-probabilities each" in reasons[-1]["message"], reasons
        assert tokens(client)


class TestUsualClients:
    """Bodies as the `openai` client and evaluation harnesses write them."""

    def test_openai_client_chats_with_tools_formats_and_logprobs(self, client: httpx.Client, served: Served) -> None:
        openai = pytest.importorskip("openai")
        api = openai.OpenAI(base_url=f"{served.api.url}/v1", api_key="none", http_client=client)
        base = api.models.list().data[0].id
        common = {"model": base, "messages": MESSAGES, "max_tokens": 4, "temperature": 0, "user": "someone"}
        plain = api.chat.completions.create(**common, logprobs=True, top_logprobs=2, seed=1, stop=["\n\n"])
        assert plain.choices[0].logprobs.content[0].top_logprobs
        again = [*MESSAGES, plain.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
        again[2] = {"role": "user", "content": [{"type": "text", "text": "and?"}]}
        assert api.chat.completions.create(**{**common, "messages": again}, metadata={"a": "b"}, store=False).choices
        parts = list(api.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
        assert parts[-1].usage.completion_tokens > 0
        tools = api.chat.completions.create(**common, tools=[TOOL], tool_choice="auto", parallel_tool_calls=True)
        assert tools.choices
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        for response_format in (
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
        ):
            assert api.chat.completions.create(**common, response_format=response_format).choices
        assert api.completions.create(model=base, prompt=["a", "b"], max_tokens=2, echo=True, logprobs=1).choices[1]
        assert api.responses.create(model=base, input=MESSAGES, max_output_tokens=16).output

    def test_evaluation_harness_asks_for_logprobs_of_a_batch(self, client: httpx.Client) -> None:
        body = {
            "text": ["one two", "three"],
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
            "stream": False,
            "lora_path": None,
            "image_data": None,
            "return_hidden_states": False,
        }
        answers = client.post("/generate", json=body).json()
        assert [len(answer["meta_info"]["input_token_logprobs"]) > 0 for answer in answers] == [True, True]

    def test_nulls_and_dialects_are_answered_as_what_they_mean(self, client: httpx.Client) -> None:
        """`n`, `stream`, penalties and `service_tier` as null were refused by SGLang; `reasoning` by us."""
        names = ("n", "stream", "frequency_penalty", "presence_penalty", "stop", "tools", "tool_choice", "logprobs")
        nulls = dict.fromkeys((*names, "temperature", "top_p", "seed", "user", "parallel_tool_calls"))
        turns = [
            *MESSAGES,
            {"role": "assistant", "content": "a", "reasoning": "so"},
            {"role": "user", "content": [{"type": "input_text", "text": "and?"}]},
        ]
        json_type = {"Content-Type": "application/json; charset=utf-8; x=y"}
        for path, body in (
            ("/v1/chat/completions", {"messages": turns, "max_tokens": 2, **nulls, "tools": [], "stop": []}),
            ("/v1/completions", {"prompt": "a", "n": None, "max_tokens": None, "echo": None, "logprobs": None}),
            ("/v1/responses", {**BODIES["/v1/responses"], "service_tier": None, "tools": None, "stream": None}),
            ("/v1/tokenize", {"messages": turns, "add_special_tokens": None}),
        ):
            answer = client.post(path, content=json.dumps(body), headers=json_type)
            assert answer.status_code == 200, f"{path}: {answer.text[:500]}"

    def test_many_who_ask_for_health_share_one_token(self, client: httpx.Client) -> None:
        """Each made the model compute one, with a key and without, and waited a second."""
        counted = "sglang:realtime_tokens_total"
        assert client.get("/health").status_code == 200
        before = counter(client, counted)
        with ThreadPoolExecutor(8) as pool:
            assert {one.status_code for one in pool.map(lambda _: client.get("/health"), range(40))} == {200}
        assert counter(client, counted) - before <= 4


def counter(client: httpx.Client, name: str) -> float:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)
