"""The common fields of OpenAI's routes, and the names that clients of other servers use for them.

Source: OpenAI's API reference; vLLM's request models for its clients' additional fields.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kt_runtime.serve.requests.bodies.bounds import (
    Body,
    Label,
    LongName,
    Name,
    Penalty,
    RepetitionPenalty,
    Share,
    Stop,
    Temperature,
    TopK,
)
from kt_runtime.serve.requests.bodies.free_json import FreeObject

# Fields of vLLM's and others' clients that SGLang has under another name, or does not have.
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(
        ("guided_json", "structured_outputs"),
        'send response_format: {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}, `regex` or `ebnf`',
    ),
    "guided_regex": "send it as `regex`",
    "guided_choice": "send `regex` with the choices between |",
    "guided_grammar": "send it as `ebnf`",
    **dict.fromkeys(
        ("guided_decoding_backend", "guided_whitespace_pattern"), "the server has one grammar backend; leave it out"
    ),
    "include_stop_str_in_output": "send `no_stop_trim: true`",
    "prompt_logprobs": "POST to /generate with `return_logprob: true` and `logprob_start_len: 0`",
    "allowed_token_ids": "send a `regex`, or a `logit_bias`",
    "bad_words": "send a `logit_bias` for their tokens",
    "request_id": "send it as `rid`",
    "return_tokens_as_token_ids": "send `return_token_ids: true`",
    "truncate_prompt_tokens": "cut the prompt before sending it",
    "enable_thinking": 'send chat_template_kwargs: {"enable_thinking": ...}',
    "thinking_budget": "a budget for thinking alone is not offered; `max_tokens` bounds both",
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), "beam search is not offered"),
    **dict.fromkeys(("logits_processors", "vllm_xargs", "kv_transfer_params"), "it is for vLLM's own extensions"),
    "detokenize": "send `return_token_ids: true` and ignore the text",
    "spaces_between_special_tokens": 'send chat_template_kwargs: {"spaces_between_special_tokens": false}',
}
# Values with which an unsupported field changes nothing, besides null, false and empty values.
NEUTRAL: dict[str, Any] = {"length_penalty": 1, "detokenize": True, "spaces_between_special_tokens": True}


class OpenAIBody(Body, kw_only=True):
    """`null` means an omitted field, as in OpenAI's API; SGLang's models refuse null in some fields."""

    null_is_left_out: ClassVar[bool] = True

    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    stop: Stop | None = None
    stream: bool = False
    session_id: Name | None = None
    # Sent by OpenAI's clients, ignored by SGLang. Answers are never stored, whatever the value of `store`.
    user: LongName | None = None
    metadata: FreeObject | None = None
    store: bool | None = None
    service_tier: Label | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Label | None = None
    usage: FreeObject | None = None  # OpenRouter's; answers always have the usage
