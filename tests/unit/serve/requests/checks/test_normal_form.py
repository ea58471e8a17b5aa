"""Bodies as honest clients write them: what SGLang is given, and what is refused with what to send instead."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from reference.server.request_bodies import BODIES, MESSAGES, body_type_of

from kt_runtime.serve.requests.bodies.openai import ELSEWHERE
from kt_runtime.serve.requests.checks.checking import parsed
from kt_runtime.serve.requests.checks.refusal import Refusal

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def given(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What SGLang is given."""
    found: dict[str, Any] = json.loads(parsed(json.dumps(body).encode(), body_type_of(path))[1])
    return found


def refused(path: str, body: dict[str, Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        given(path, body)
    assert caught.value.status == 400
    return caught.value


def test_a_body_in_normal_form_stays_the_clients_own_bytes() -> None:
    for path, body in BODIES.items():
        sent = json.dumps(body, indent=3).encode()
        assert parsed(sent, body_type_of(path))[1] is sent
    body = {**BODIES[CHAT], "messages": [{"role": "assistant", "content": None, "reasoning_content": "so"}]}
    assert given(CHAT, body) == body


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES, "/v1/tokenize"])
def test_null_means_left_out_for_every_field_that_need_not_be_there(path: str) -> None:
    from sglang.srt.entrypoints.openai import protocol

    model = {
        CHAT: protocol.ChatCompletionRequest,
        COMPLETION: protocol.CompletionRequest,
        RESPONSES: protocol.ResponsesRequest,
        "/v1/tokenize": protocol.TokenizeRequest,
    }[path]
    kind = body_type_of(path)
    names = {field.encode_name for field in msgspec.structs.fields(kind)} | kind.left_out.keys()
    nulls = dict.fromkeys(names - BODIES[path].keys())
    assert len(nulls) > 5
    assert given(path, {**BODIES[path], **nulls}) == BODIES[path]
    model.model_validate(BODIES[path])


@pytest.mark.parametrize("field", ["messages", "prompt", "input"])
def test_null_for_what_must_be_there_is_refused(field: str) -> None:
    path = {"messages": CHAT, "prompt": COMPLETION, "input": RESPONSES}[field]
    assert f"{field} is missing" in refused(path, {**BODIES[path], field: None}).message


def test_defaults_that_clients_write_out_do_not_reach_sglang() -> None:
    """vLLM's, LangChain's and LiteLLM's."""
    defaults: dict[str, Any] = {
        "guided_json": None,
        "guided_choice": [],
        "include_stop_str_in_output": False,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "early_stopping": False,
        "bad_words": [],
        "logits_processors": [],
        "spaces_between_special_tokens": True,
        "vllm_xargs": {},
        "functions": [],
        "function_call": None,
        "best_of": 1,
        "custom_labels": {},
    }
    assert given(CHAT, {**BODIES[CHAT], **defaults}) == BODIES[CHAT]
    kept: dict[str, Any] = {"tools": [], "stop": [], "stop_token_ids": [], "logit_bias": {}}
    assert given(CHAT, {**BODIES[CHAT], **kept}) == {**BODIES[CHAT], **kept}
    assert given("/generate", {**BODIES["/generate"], "image_data": None}) == BODIES["/generate"]
    refused("/generate", {**BODIES["/generate"], "positional_embed_overrides": {}})


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("guided_json", {"type": "object"}, "response_format"),
        ("guided_regex", "a+", "`regex`"),
        ("guided_choice", ["a", "b"], "`regex`"),
        ("include_stop_str_in_output", True, "`no_stop_trim: true`"),
        ("length_penalty", 1.5, "beam search"),
        ("spaces_between_special_tokens", 1, "chat_template_kwargs"),
        ("enable_thinking", True, "chat_template_kwargs"),
        ("prompt_logprobs", 1, "logprob_start_len"),
        ("functions", [{}], "`tools`"),
        ("chat_template", "{{ x }}", "own template"),
    ],
)
def test_what_is_asked_under_a_name_of_another_servers_is_refused_with_ours(
    field: str, value: Any, instead: str
) -> None:
    caught = refused(CHAT, {**BODIES[CHAT], field: value})
    assert caught.message.startswith(f"{field} is not available") and instead in caught.message
    assert caught.field == field


def test_every_name_of_another_servers_is_told_on_both_routes() -> None:
    for name in ELSEWHERE:
        for path in (CHAT, COMPLETION):
            assert name in refused(path, {**BODIES[path], name: "x"}).message


def test_no_new_tokens_are_refused_with_what_scores_a_prompt() -> None:
    caught = refused(COMPLETION, {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0})
    assert caught.field == "max_tokens" and "max_new_tokens: 0" in caught.message
    refused(CHAT, {"messages": MESSAGES, "max_tokens": 0})  # SGLang takes it for no limit


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (
            {"role": "assistant", "content": "a", "reasoning": "so", "reasoning_content": None},
            {"role": "assistant", "content": "a", "reasoning_content": "so"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "so", "reasoning_content": "before"},
            {"role": "assistant", "content": "a", "reasoning_content": "before"},
        ),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "a", "annotations": []},
                    {"type": "refusal", "refusal": "no"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "no"}]},
        ),
    ],
)
def test_messages_of_other_dialects_become_sglangs(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    found = given(CHAT, {"messages": [*MESSAGES, sent]})
    assert found == {"messages": [*MESSAGES, expected]}
    ChatCompletionRequest.model_validate(found)


def test_what_clients_send_back_of_an_answer_is_taken() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "parsed": {"a": 1},
        "cache_control": {"type": "ephemeral"},
        "reasoning_details": [{"type": "reasoning.text", "text": "so"}],
        "thinking_blocks": [],
        "provider_specific_fields": {"a": None},
        "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}", "parsed_arguments": {}}}],
    }
    body = {"messages": [*MESSAGES, message, {"role": "tool", "tool_call_id": "1", "content": "seen"}]}
    assert given(CHAT, body) == body


@pytest.mark.parametrize("wrong", [5, "x", [5], [{"type": 5}], [{"type": "input_text"}], {"content": 1}, None])
def test_wrong_messages_are_refused_and_no_fault(wrong: Any) -> None:
    refused(CHAT, {"messages": wrong})
    refused(CHAT, {"messages": [{"role": "user", "content": [wrong]}]})
    refused(CHAT, {"messages": [{"role": "user", "content": "a", "reasoning": [wrong]}]})
