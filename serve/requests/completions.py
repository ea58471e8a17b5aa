"""Bodies of /v1/completions, /v1/tokenize and /v1/detokenize.

Source: `CompletionRequest`, `TokenizeRequest` and `DetokenizeRequest` in `sglang.srt.entrypoints.openai.protocol` of
SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from kt_runtime.serve.requests.bounds import (
    BOUNDED_BY_BODY,
    Body,
    CompletionLogprobs,
    Count,
    Effort,
    Name,
    NewTokens,
    Prompt,
    Prompts,
    RepetitionPenalty,
    Samples,
    Share,
    Temperature,
    TokenId,
    TokenIds,
    TopK,
)
from kt_runtime.serve.requests.chat import Completing, Messages, ToolChoice, Tools
from kt_runtime.serve.requests.free_json import Grammar, TemplateArguments

TextsOrIds: TypeAlias = Annotated[list[Prompt | TokenId | TokenIds], Meta(min_length=1, extra=BOUNDED_BY_BODY)]


class TextCompletion(Completing, kw_only=True):
    """`prompt` as a list: texts, token ids, or lists of token ids; `prompts.py` refuses a mixture."""

    prompt: Prompt | TextsOrIds
    best_of: Samples | None = None
    echo: bool = False
    logprobs: CompletionLogprobs | None = None
    max_tokens: NewTokens = 16
    suffix: Prompt | None = None
    temperature: Temperature = 1.0
    top_p: Share = 1.0
    top_k: TopK = -1
    min_p: Share = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    json_schema: Grammar | None = None


class Tokenize(Body, kw_only=True):
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
