"""Bodies of /v1/completions, /v1/tokenize and /v1/detokenize.

Source: `CompletionRequest`, `TokenizeRequest` and `DetokenizeRequest` in `sglang.srt.entrypoints.openai.protocol` of
SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta

from kt_runtime.serve.requests.bodies.bounds import (
    BOUNDED_BY_BODY,
    Body,
    CompletionLogprobs,
    Count,
    Effort,
    Name,
    NewTokens,
    Prompt,
    Prompts,
    Samples,
    TokenId,
    TokenIds,
)
from kt_runtime.serve.requests.bodies.chat import Completing, Messages, ToolChoice, Tools
from kt_runtime.serve.requests.bodies.free_json import Grammar, TemplateArguments

TextsOrIds: TypeAlias = Annotated[list[Prompt | TokenId | TokenIds], Meta(min_length=1, extra=BOUNDED_BY_BODY)]


class TextCompletion(Completing, kw_only=True):
    """`prompt` as a list: texts, token ids, or lists of token ids; `prompts.py` refuses a mixture."""

    prompt: Prompt | TextsOrIds
    best_of: Samples | None = None
    echo: bool = False
    logprobs: CompletionLogprobs | None = None
    max_tokens: NewTokens = 16
    suffix: Prompt | None = None
    json_schema: Grammar | None = None

    left_out: ClassVar[dict[str, str]] = {
        **Completing.left_out,
        "add_special_tokens": "send token ids as `prompt` where the tokenizer should add none",
    }
    neutral: ClassVar[dict[str, Any]] = {**Completing.neutral, "add_special_tokens": True}


class Tokenize(Body, kw_only=True):
    null_is_left_out: ClassVar[bool] = True

    model: Name | None = None
    prompt: Prompt | Prompts | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    tool_choice: Literal["auto", "required", "none"] | ToolChoice | None = None
    reasoning_effort: Effort | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateArguments | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None


class Detokenize(Body, kw_only=True):
    tokens: Annotated[list[Count | Annotated[list[Count], Meta(extra=BOUNDED_BY_BODY)]], Meta(extra=BOUNDED_BY_BODY)]
    model: Name | None = None
    skip_special_tokens: bool = True
