"""From bytes to a struct, or to a refusal that names the field, its value and what is near."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from reference.server.request_bodies import BODIES, NESTED, body_type_of

from kt_runtime.serve.requests.bodies.bounds import Body
from kt_runtime.serve.requests.bodies.chat import ChatCompletion
from kt_runtime.serve.requests.bodies.generate import Generate
from kt_runtime.serve.requests.bodies.messages import AnthropicMessages
from kt_runtime.serve.requests.checks.checking import parsed, read_json
from kt_runtime.serve.requests.checks.refusal import Refusal, answer


def refusal(body: Any, body_type: type[Body] = Generate) -> Refusal:
    with pytest.raises(Refusal) as raised:
        parsed(body if isinstance(body, bytes) else json.dumps(body).encode(), body_type)
    assert raised.value.status == 400 and len(raised.value.message) < 1500
    return raised.value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"custom_labels": {"a": "b"}}, "custom_labels is not available under kt-runtime: metrics have the labels"),
        ({"positional_embed_overrides": [1]}, "positional_embed_overrides is not available"),
        ({"temprature": 1}, "unknown field 'temprature' (1)"),
        ({"sampling_params": {"topk": 5}}, "unknown field 'sampling_params.topk' (5); did you mean 'top_k'"),
        ({"sampling_params": [{"zzz": 5}]}, "unknown field 'sampling_params[0].zzz' (5); known: "),
        (
            {"sampling_params": {"top_k": 2**63}},
            "sampling_params.top_k 9223372036854775808: Expected `int` <= 2147483647",
        ),
        ({"sampling_params": {"is_normalized": True}}, "SGLang sets it itself"),
        ({"sampling_params": {"n": None}}, "sampling_params.n null: Expected `int`, got `null`"),
        ({"sampling_params": {"temperature": "1"}}, "sampling_params.temperature '1': Expected `float | null`"),
        ({"sampling_params": {"logit_bias": {"a": 1}}}, "sampling_params.logit_bias: a key is wrong"),
        ({"sampling_params": {"stop_regex": "("}}, "sampling_params.stop_regex '(': is no regular expression"),
        ({"sampling_params": {"stop_regex": ["a", 5]}}, "got `int`"),
        ({"sampling_params": {"stop_regex": "a" * 257}}, "is 257 bytes; allowed are 256"),
        ({"sampling_params": {"stop_regex": ["a"] * 3}}, "has 3 patterns; allowed are 2"),
        ({"sampling_params": {"json_schema": "a" * 65537}}, "is 65537 bytes; allowed are 65536"),
        ({"sampling_params": {"json_schema": {"$ref": "#"}}}, "Expected `str`, got `object`"),
        ({"session_params": {"x": 1}}, "unknown field 'session_params.x' (1)"),
        ({"session_params": {}}, "session_params.id is missing"),
        ({"text": 5}, "text 5: Expected `str | array | null`, got `int`"),
        ({"input_ids": [5, 2**31]}, "input_ids[1] 2147483648"),
        ({"x" * 5000: 1}, "... (5000 characters)"),
        ({"rid": "HEALTH_CHECK_1"}, "rid 'HEALTH_CHECK_1': Expected `str` matching regex"),
        ({"rid": ["a", "HEALTH_CHECK"]}, "rid[1] 'HEALTH_CHECK': Expected `str` matching regex"),
        ({"rid": ""}, "rid '': Expected `str` of length >= 1"),
        ({"rid": "x" * 5000}, "... (5000 characters): Expected `str` of length <= 256"),
    ],
)
def test_refusal_says_what_is_wrong_where_and_what_is_near(fields: dict[str, Any], message: str) -> None:
    assert message in refusal(fields).message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object, not [1]"),
        (b'{"text": NaN}', "not valid JSON"),
        (b'{"text": Infinity}', "not valid JSON"),
        (b'{"sampling_params": {"temperature": 1e999}}', "not valid JSON"),
        (b'{"text": "\xff"}', "not valid UTF-8 at byte 10"),
        (b'{"text": "\\ud800"}', "not valid JSON"),
        (b"\xff\xfe{\x00}\x00", "not valid UTF-8"),
        (b'{"text": "a", "text": "b"}', "has the key 'text' twice"),
        (b'{"a": {"b": 1, "b": 1}}', "has the key 'b' twice"),
        (b'{"a": ' + b"[" * 100_000, "nested too deep"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "unknown field 'a'"),
        (b'{"text": "a", "sampling_params": {"seed": ' + b"9" * 5000 + b"}}", "not valid JSON"),
        (b'{"text": "a"} x', "not valid JSON"),
    ],
)
def test_what_is_no_plain_json_is_refused(body: bytes, message: str) -> None:
    assert message in refusal(body).message


def test_million_of_small_objects_is_refused_before_python_has_made_them_all() -> None:
    body = b'{"metadata": [' + b",".join([b"{}"] * 60_000) + b"]}"
    assert "more than 50000 JSON objects" in refusal(body, ChatCompletion).message


def test_what_is_the_clients_own_is_bounded_in_depth_and_bytes() -> None:
    deep: Any = {}
    for depth in range(400):
        deep = {"a": deep}
        if depth in (70, 399):  # orjson's own limit is in between
            message = refusal({"messages": [], "chat_template_kwargs": deep}, ChatCompletion).message
            assert "chat_template_kwargs" in message and "nested more than 64 deep" in message


@pytest.mark.parametrize("name", ["add_generation_prompt", "chat_template", "messages", "self", "tokenize"])
def test_arguments_of_rendering_are_no_variables_of_the_template(name: str) -> None:
    """SGLang passes them as keywords beside its own: TypeError, status 500."""
    message = refusal(
        {"messages": [], "chat_template_kwargs": {"enable_thinking": True, name: 1}}, ChatCompletion
    ).message
    assert message.startswith("chat_template_kwargs") and f"`{name}` is set by the server" in message
    body = {"messages": [], "metadata": {"a": "x" * 70_000}}
    assert "bytes of JSON; allowed are 65536" in refusal(body, ChatCompletion).message


@pytest.mark.parametrize(
    "schema", [{"properties": 5}, {"properties": {"a": 5}}, {"properties": {"strict": True}}, {"title": 5}, "x"]
)
def test_schema_that_ends_sglangs_own_parsing_is_refused(schema: Any) -> None:
    body = {"messages": [], "response_format": {"type": "json_schema", "schema": schema}}
    assert "response_format.schema" in refusal(body, ChatCompletion).message


@pytest.mark.parametrize("part", ["image_url", "input_audio", "video_url", "zzz"])
def test_pictures_and_sounds_are_no_parts_of_a_message(part: str) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": part, part: {"url": "http://127.0.0.1/"}}]}]}
    assert "messages[0].content[0].type" in refusal(body, ChatCompletion).message


def test_defaults_of_fields_that_are_left_out_may_be_written_out() -> None:
    fields = {"image_data": None, "return_hidden_states": False, "sampling_params": {"beam_width": None}}
    assert parsed(json.dumps({"text": "a", **fields}).encode(), Generate)[0].text == "a"
    assert "return_hidden_states" in refusal({"text": "a", "return_hidden_states": True}).message


def test_bodies_of_usual_clients_fit() -> None:
    for path, body in [*BODIES.items(), *NESTED]:
        body_type = body_type_of(path)
        assert isinstance(parsed(json.dumps(body).encode(), body_type)[0], body_type)


def test_what_sglangs_parser_reads_is_what_was_checked() -> None:
    assert read_json(b'{"a": 1.0, "b": [1, 2]}') == {"a": 1.0, "b": [1, 2]}


def test_answer_has_the_format_of_the_routes_api() -> None:
    refused = refusal({"model": "m", "messages": [], "max_tokens": 0}, AnthropicMessages)
    assert json.loads(answer(refused, "/v1/messages")) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": refused.message},
    }
    error = json.loads(answer(refused, "/v1/completions"))["error"]
    assert error["param"] == "max_tokens" and error["type"] == "invalid_request_error" and error["code"] == 400
    assert json.loads(answer(refused, "/kt/adapters"))["error"]["kind"] == "InvalidValueError"


@pytest.mark.slow
def test_process_that_has_checked_bodies_ends_without_a_crash() -> None:
    """In which order Python collects the classes at its end is chance: one process in four crashed."""
    code = (
        "from kt_runtime.serve.requests.bodies import chat, generate\n"
        "from kt_runtime.serve.requests.checks import checking\n"
        "checking.parsed(b'{\"messages\": []}', chat.ChatCompletion)\n"
        'checking.parsed(b\'{"text": "a"}\', generate.Generate)\n'
    )
    ended = [subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode for _ in range(10)]
    assert ended == [0] * 10


def test_fields_of_openai_that_are_not_offered_may_be_null_and_say_why() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    none = dict.fromkeys(("functions", "function_call", "prediction", "web_search_options", "audio"))
    parsed(json.dumps({**body, **none}).encode(), ChatCompletion)
    assert "use `tools`" in refusal({**body, "functions": [{"name": "f"}]}, ChatCompletion).message
