"""Bodies of /v1/score and /v1/decisions, and of the routes that parse a finished answer.

Source: `ScoringRequest` and `DecisionRequest` in `sglang.srt.entrypoints.openai.protocol`, `ParseFunctionCallReq` and
`SeparateReasoningReqInput` in `sglang.srt.managers.io_struct` of SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from kt_runtime.serve.requests.bodies.bounds import (
    BOUNDED_BY_BODY,
    MAX_PROMPTS,
    Body,
    Count,
    Label,
    Name,
    Prompt,
    TokenIds,
)
from kt_runtime.serve.requests.bodies.chat import Tools
from kt_runtime.serve.requests.bodies.free_json import TemplateArguments
from kt_runtime.serve.requests.bodies.generate import NO_EMBEDDINGS, NO_MEDIA, NOT_OFFERED

LabelIds = Annotated[list[Count], Meta(max_length=1024)]
PositiveTemperature = Annotated[float, Meta(gt=0, le=1000)]
# Some models' parsers search a tool call's end from every possible start: quadratic in the text's length.
CallText = Annotated[str, Meta(max_length=32 * 1024)]
AnswerText = Annotated[str, Meta(max_length=256 * 1024)]


class Score(Body, kw_only=True):
    query: Prompt | TokenIds
    items: Prompt | Annotated[list[Prompt | TokenIds], Meta(min_length=1, max_length=MAX_PROMPTS)]
    label_token_ids: Annotated[list[Count | LabelIds], Meta(min_length=1, max_length=1024)]
    apply_softmax: bool = False
    temperature: PositiveTemperature = 1.0
    return_token_logprobs: bool = False
    item_first: bool = False
    model: Name | None = None

    left_out: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("embed_override_token_id", "query_embed_overrides", "item_embed_overrides"), NO_EMBEDDINGS),
        "return_pooled_hidden_states": NOT_OFFERED,
        "score_extraction_token": NOT_OFFERED,
    }


class DecisionOption(Body, kw_only=True):
    name: Name
    description: Prompt | None = None


class Question(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    id: Name
    question: Prompt


class ChoiceQuestion(Question, tag="choice", kw_only=True):
    options: Annotated[list[DecisionOption], Meta(min_length=2, max_length=26)]


class ScoreQuestion(Question, tag="score", kw_only=True):
    levels: Annotated[list[Prompt], Meta(min_length=2, max_length=10)]


class YesNoQuestion(Question, tag="yes_no", kw_only=True):
    yes: Prompt | None = None
    no: Prompt | None = None


class Decisions(Body, kw_only=True):
    input: Prompt
    questions: Annotated[
        list[ChoiceQuestion | ScoreQuestion | YesNoQuestion], Meta(min_length=1, max_length=256, extra=BOUNDED_BY_BODY)
    ]
    temperature: PositiveTemperature = 1.0
    chat_template_kwargs: TemplateArguments | None = None
    prompt_format_version: Count | None = None
    return_prompt_token_ids: bool = False
    model: Name | None = None

    left_out: ClassVar[dict[str, str]] = {"images": NO_MEDIA}


class FunctionCallText(Body, kw_only=True):
    text: CallText
    tool_call_parser: Label
    tools: Tools = msgspec.field(default_factory=list)


class ReasoningText(Body, kw_only=True):
    text: AnswerText
    reasoning_parser: Label
    return_blocks: bool = False
