"""Body of /v1/responses. Source: `ResponsesRequest` in `sglang.srt.entrypoints.openai.protocol` of SGLang 0.5.23."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from kt_runtime.serve.requests.bodies.bounds import (
    Body,
    ChatTopLogprobs,
    Count,
    Effort,
    Label,
    Name,
    Priority,
    Prompt,
    RequestId,
)
from kt_runtime.serve.requests.bodies.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from kt_runtime.serve.requests.bodies.free_json import FreeObject, FreeValue, TemplateArguments
from kt_runtime.serve.requests.bodies.generate import NO_CHOICE_OF_RANK, OTHER_RANKS
from kt_runtime.serve.requests.bodies.openai import OpenAIBody

TEXT_PARTS = Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
ITEMS = Literal[
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
]


class ResponsePart(Body, kw_only=True):
    type: TEXT_PARTS
    text: Prompt | None = None
    refusal: Prompt | None = None
    annotations: FreeValue | None = None
    logprobs: FreeValue | None = None


class ResponseItem(Body, kw_only=True):
    """One item of `input`: a message, a step of reasoning, a tool's call or its result."""

    type: ITEMS = "message"
    role: Label | None = None
    content: Prompt | Annotated[list[ResponsePart], Meta(max_length=MAX_PARTS)] | None = None
    id: Name | None = None
    status: Label | None = None
    phase: Label | None = None
    call_id: Name | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: Prompt | None = None
    input: Prompt | None = None
    output: Prompt | Annotated[list[ResponsePart], Meta(max_length=MAX_PARTS)] | None = None
    summary: Annotated[list[ResponsePart], Meta(max_length=MAX_PARTS)] | None = None
    encrypted_content: Prompt | None = None


class ResponseReasoning(Body, kw_only=True):
    effort: Effort | None = None
    summary: Label | None = None
    generate_summary: Label | None = None


class Responses(OpenAIBody, kw_only=True):
    input: Prompt | Annotated[list[ResponseItem], Meta(max_length=MAX_MESSAGES)]
    model: Name
    include: Annotated[list[Name], Meta(max_length=16)] | None = None
    instructions: Prompt | None = None
    max_output_tokens: Annotated[int, Meta(ge=16, le=2**31 - 1)] | None = None
    max_tool_calls: Count | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponseReasoning | None = None
    stream_options: FreeObject | None = None
    text: FreeObject | None = None
    tool_choice: FreeValue | None = None
    tools: Annotated[list[FreeObject], Meta(max_length=MAX_TOOLS)] = msgspec.field(default_factory=list)
    top_logprobs: ChatTopLogprobs | None = None
    truncation: Label | None = None
    chat_template_kwargs: TemplateArguments | None = None
    request_id: RequestId | None = None
    priority: Priority = 0
    extra_key: Name | None = None
    cache_salt: Name | None = None

    left_out: ClassVar[dict[str, str]] = {
        **dict.fromkeys(OTHER_RANKS, NO_CHOICE_OF_RANK),
        "background": "answers are not kept on the server",
        "previous_response_id": "answers are not kept on the server; send the conversation as `input`",
        "conversation": "conversations are not kept on the server; send them as `input`",
        "prompt": "templates are not kept on the server; send the text as `input`",
    }
