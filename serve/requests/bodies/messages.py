"""Bodies of /v1/messages and /v1/messages/count_tokens.

Source: `sglang.srt.entrypoints.anthropic.protocol` of SGLang 0.5.23, and Anthropic's API reference for fields that its
clients send and SGLang ignores.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kt_runtime.serve.requests.bodies.bounds import (
    LARGEST_INT32,
    MAX_STOP_STRINGS,
    Body,
    Count,
    Label,
    Name,
    Names,
    Prompt,
    Share,
    StopString,
    Temperature,
    TopK,
)
from kt_runtime.serve.requests.bodies.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from kt_runtime.serve.requests.bodies.free_json import FreeObject, FreeValue, SchemaObject
from kt_runtime.serve.requests.bodies.generate import NO_CHOICE_OF_RANK, OTHER_RANKS


class Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """One block of a message's content, tagged by `type`. Images and documents are not accepted."""

    cache_control: FreeObject | None = None  # ignored: every prefix is cached


class TextBlock(Block, tag="text", kw_only=True):
    text: Prompt
    citations: FreeValue | None = None


class ToolUseBlock(Block, tag="tool_use", kw_only=True):
    id: Name
    name: Name
    input: FreeObject | None = None
    caller: FreeObject | None = None


class ToolReferenceBlock(Block, tag="tool_reference", kw_only=True):
    name: Name | None = None
    tool_name: Name | None = None
    id: Name | None = None


class SearchResultBlock(Block, tag="search_result", kw_only=True):
    source: Prompt | None = None
    title: Prompt | None = None
    content: Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | None = None
    citations: FreeValue | None = None


class ThinkingBlock(Block, tag="thinking", kw_only=True):
    thinking: Prompt
    signature: Prompt | None = None


class RedactedThinkingBlock(Block, tag="redacted_thinking", kw_only=True):
    data: Prompt | None = None


ResultBlock: TypeAlias = TextBlock | ToolReferenceBlock | SearchResultBlock


class ToolResultBlock(Block, tag="tool_result", kw_only=True):
    tool_use_id: Name | None = None
    id: Name | None = None
    content: Prompt | Annotated[list[ResultBlock], Meta(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None


AnyBlock: TypeAlias = (
    TextBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolReferenceBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)
Blocks: TypeAlias = Annotated[list[AnyBlock], Meta(max_length=MAX_PARTS)]


class AnthropicMessage(Body, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Prompt | Blocks


class AnthropicTool(Body, kw_only=True):
    """`type`: for Anthropic's own tools it starts with their family; for the client's tools "custom" or missing."""

    name: Name
    type: Label | None = None
    description: Prompt | None = None
    input_schema: SchemaObject | None = None
    strict: bool = False
    defer_loading: bool | None = None
    max_uses: Count | None = None
    allowed_domains: Names | None = None
    blocked_domains: Names | None = None
    display_width_px: Count | None = None
    display_height_px: Count | None = None
    display_number: Count | None = None
    cache_control: FreeObject | None = None
    eager_input_streaming: bool | None = None


class AnthropicToolChoice(Body, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Label | None = None


class TaskBudget(Body, kw_only=True):
    type: Literal["tokens"]
    total: Annotated[int, Meta(ge=1, le=LARGEST_INT32)]
    remaining: Count | None = None


class OutputFormat(Body, kw_only=True):
    type: Literal["json_schema"]
    schema: SchemaObject


class OutputConfig(Body, kw_only=True):
    effort: Label | None = None
    task_budget: TaskBudget | None = None
    format: OutputFormat | None = None


class CountTokens(Body, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[list[AnthropicMessage], Meta(max_length=MAX_MESSAGES)]
    system: Prompt | Blocks | None = None
    thinking: Thinking | None = None
    tool_choice: AnthropicToolChoice | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    output_config: OutputConfig | None = None
    # Sent by Anthropic's clients, ignored by SGLang.
    betas: Names | None = None
    context_management: FreeObject | None = None
    cache_control: FreeObject | None = None

    left_out: ClassVar[dict[str, str]] = {
        **dict.fromkeys(OTHER_RANKS, NO_CHOICE_OF_RANK),
        "mcp_servers": "the server calls no other server",
        "container": "the server runs no code for a client",
    }


class AnthropicMessages(CountTokens, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=LARGEST_INT32)]
    metadata: FreeObject | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Share | None = None
    service_tier: Label | None = None
    inference_geo: Label | None = None
