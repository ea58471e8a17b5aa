"""Bodies of /v1/chat/completions and /invocations: messages, tools, formats.

Source: `ChatCompletionRequest` in `sglang.srt.entrypoints.openai.protocol` of SGLang 0.5.23, and OpenAI's API reference
for fields that its clients send and SGLang ignores.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kt_runtime.serve.requests.bodies.bounds import (
    MAX_PROMPTS,
    Body,
    ChatTopLogprobs,
    Count,
    Effort,
    FewTokenIds,
    Label,
    LogitBias,
    Name,
    NewTokens,
    Priority,
    Prompt,
    RequestId,
    RequestIds,
    Samples,
    Seed,
    TokenIds,
)
from kt_runtime.serve.requests.bodies.free_json import (
    FreeObject,
    FreeValue,
    Grammar,
    SchemaObject,
    StopPattern,
    TemplateArguments,
)
from kt_runtime.serve.requests.bodies.generate import (
    MEDIA,
    NO_CHOICE_OF_RANK,
    NO_MEDIA,
    NOT_OFFERED,
    OTHER_RANKS,
    SessionParams,
)
from kt_runtime.serve.requests.bodies.openai import ELSEWHERE, NEUTRAL, OpenAIBody
from kt_runtime.serve.requests.bodies.sampling import NO_PROCESSORS, NO_WATERMARK

MAX_MESSAGES, MAX_PARTS, MAX_TOOLS = 4096, 1024, 512


class Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """One part of a message's content, tagged by `type`. Images, audio and video are not accepted."""


class TextPart(Part, tag="text", kw_only=True):
    text: Prompt
    cache_control: FreeObject | None = None  # Anthropic's, also sent to OpenAI's routes; ignored


class ThinkingPart(Part, tag="thinking", kw_only=True):
    thinking: Prompt | None = None
    text: Prompt | None = None


class ReasoningPart(Part, tag="reasoning", kw_only=True):
    thinking: Prompt | None = None
    text: Prompt | None = None


class ToolReferencePart(Part, tag="tool_reference", kw_only=True):
    name: Name


AnyPart: TypeAlias = TextPart | ThinkingPart | ReasoningPart | ToolReferencePart
Content: TypeAlias = Prompt | Annotated[list[AnyPart], Meta(max_length=MAX_PARTS)] | None


class Function(Body, kw_only=True):
    name: Name
    description: Prompt | None = None
    parameters: FreeValue | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(Body, kw_only=True):
    function: Function
    type: Label = "function"
    defer_loading: bool | None = None
    cache_control: FreeObject | None = None


Tools: TypeAlias = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class CalledFunction(Body, kw_only=True):
    name: Name | None = None
    arguments: FreeValue | None = None  # text, or an object
    parsed_arguments: FreeValue | None = None  # of OpenAI's client, ignored


class ToolCall(Body, kw_only=True):
    function: CalledFunction
    id: Name | None = None
    index: Count | None = None
    type: Literal["function"] = "function"


class Message(Body, kw_only=True):
    role: Label
    content: Content = None
    name: Name | None = None
    tool_call_id: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tools: Tools | None = None
    reasoning_content: Prompt | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    prefix: bool | None = None
    # Written by OpenAI's client when it sends an answer back; ignored.
    refusal: Prompt | None = None
    annotations: FreeValue | None = None
    parsed: FreeValue | None = None
    audio: None = None
    function_call: None = None
    # Written by LiteLLM and OpenRouter. `normal_form` has already renamed `reasoning` to `reasoning_content`.
    id: Name | None = None
    cache_control: FreeObject | None = None
    reasoning_details: FreeValue | None = None
    thinking_blocks: FreeValue | None = None
    provider_specific_fields: FreeValue | None = None


Messages: TypeAlias = Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Body, kw_only=True):
    name: Name
    description: Prompt | None = None
    schema: SchemaObject | None = None
    strict: bool | None = None


class ResponseFormat(Body, kw_only=True):
    """`schema` beside `type` is the older form of a JSON schema. The last four fields belong to structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema: SchemaObject | None = None
    format: FreeObject | None = None
    structures: Annotated[list[FreeObject], Meta(max_length=64)] | None = None
    triggers: Annotated[list[Name], Meta(max_length=64)] | None = None
    at_least_one: bool = False


class NamedFunction(Body, kw_only=True):
    name: Name | None = None


class ToolChoice(Body, kw_only=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class Reasoning(Body, kw_only=True):
    """OpenRouter's field to request thinking."""

    effort: Effort | None = None
    reasoning_effort: Effort | None = None
    enabled: bool | None = None
    enable: bool | None = None
    exclude: bool | None = None
    max_tokens: Count | None = None


class Completing(OpenAIBody, kw_only=True):
    """The common fields of /v1/chat/completions and /v1/completions."""

    model: Name | None = None
    logit_bias: LogitBias | None = None
    n: Samples = 1
    seed: Seed | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_cached_tokens_details: bool = False
    return_token_ids: bool = False
    min_tokens: Count = 0
    regex: Grammar | None = None
    ebnf: Grammar | None = None
    stop_token_ids: FewTokenIds | None = None
    stop_regex: StopPattern | None = None
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    lora_path: Name | Annotated[list[Name | None], Meta(max_length=MAX_PROMPTS)] | None = None
    session_params: SessionParams | None = None
    rid: RequestId | RequestIds | None = None
    extra_key: Name | Annotated[list[Name], Meta(max_length=MAX_PROMPTS)] | None = None
    cache_salt: Name | Annotated[list[Name], Meta(max_length=MAX_PROMPTS)] | None = None
    priority: Priority | None = None

    neutral: ClassVar[dict[str, Any]] = NEUTRAL
    left_out: ClassVar[dict[str, str]] = {
        **ELSEWHERE,
        **dict.fromkeys(MEDIA, NO_MEDIA),
        **dict.fromkeys(OTHER_RANKS, NO_CHOICE_OF_RANK),
        "custom_logit_processor": NO_PROCESSORS,
        "custom_params": NO_PROCESSORS,
        "watermark": NO_WATERMARK,
        "custom_labels": "metrics have the labels that the server gives them",
        **dict.fromkeys(
            (
                *("return_hidden_states", "return_routed_experts", "routed_experts_start_len"),
                *("return_spec_tokens_details", "return_sampling_mask", "sampling_logprobs_mode"),
                *("return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64"),
            ),
            NOT_OFFERED,
        ),
    }


class ChatCompletion(Completing, kw_only=True):
    """`modalities` has OpenAI's meaning, the kinds of output; SGLang's field of that name is about images."""

    left_out: ClassVar[dict[str, str]] = {
        **{name: reason for name, reason in Completing.left_out.items() if name != "modalities"},
        "functions": "it is the old way; use `tools`",
        "function_call": "it is the old way; use `tool_choice`",
        "prediction": NOT_OFFERED,
        "web_search_options": "the server searches nothing",
        "audio": "the models that kt-runtime serves write text only",
        "best_of": "send `n`",
        "echo": "/v1/completions repeats a prompt",
        "add_special_tokens": "the chat template writes them",
        "documents": "write them into a message, or into chat_template_kwargs under a name of the template's",
        "chat_template": "the server renders with the model's own template",
        "include_reasoning": "reasoning is always sent; ignore `reasoning_content` of the answer",
    }
    neutral: ClassVar[dict[str, Any]] = {**NEUTRAL, "best_of": 1, "include_reasoning": True}

    messages: Messages
    logprobs: bool = False
    top_logprobs: ChatTopLogprobs | None = None
    max_tokens: NewTokens | None = None  # SGLang treats 0 as no limit
    max_completion_tokens: NewTokens | None = None
    tools: Tools | None = None
    tool_choice: Literal["auto", "required", "none"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    reasoning_effort: Effort | None = None
    thinking: FreeValue | None = None
    task: Label | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    input_ids: TokenIds | None = None
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    return_input_ids_in_sglext: bool = False
    return_output_ids_in_sglext: bool = False
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    verbosity: Label | None = None
