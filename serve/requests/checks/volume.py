"""Bounds the volume of one request: tokens of its sequences, and log-probabilities in its answer.

Both are products of fields that are harmless alone. A prompt of 16,000 tokens with 1,024 log-probabilities at each is
16 million numbers with their tokens: gigabytes of Python objects in an answer that is built in one piece.

A text's number of tokens is unknown before tokenization; the estimate is one token per two bytes, more than real texts
have. The answer length of a request without a limit is unknown too: `sglang_patch/frontend/logprob_limits.py` counts
the log-probabilities during generation, and documents the limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kt_runtime.serve.requests.bodies.bounds import Body
from kt_runtime.serve.requests.bodies.chat import ChatCompletion
from kt_runtime.serve.requests.bodies.completions import TextCompletion
from kt_runtime.serve.requests.bodies.generate import Generate, LogprobFields, VertexGenerate
from kt_runtime.serve.requests.bodies.responses import Responses
from kt_runtime.serve.requests.bodies.sampling import SamplingParams
from kt_runtime.serve.requests.checks.refusal import Refusal
from kt_runtime.sglang_patch.frontend.logprob_limits import (
    MAX_LOGPROBS,
    MAX_LOGPROBS_AS_TEXT,
    MAX_LOGPROBS_AS_TEXT_AT_EACH,
    MAX_RESPONSES_LOGPROBS,
    MAX_STREAMED_LOGPROBS,
)

FULL_SEQUENCES = 64  # of the context length, per request
TEXT_BYTES_PER_TOKEN = 2
DEFAULT_NEW_TOKENS = 128  # SGLang's default for /generate


OUTPUT_LOGPROBS = "message.output_text.logprobs"  # requests them by `include` of /v1/responses


@dataclass(frozen=True)
class Volume:
    """`prompt_tokens`: of all prompts. `samples`: per prompt. `new_tokens`: limit of one sample; None: no limit given.
    `logprobs`: log-probabilities per token, the token's own included. `of_prompt`: prompt tokens get them too.
    `most_logprobs`: the limit for the answer.
    """

    num_prompts: int
    prompt_tokens: int
    samples: int
    new_tokens: int | None
    logprobs: int
    of_prompt: bool
    most_logprobs: int


class VolumeLimit:
    """`context_tokens`: the model's longest sequence. `longest_tokens`: the KV cache's capacity, if smaller."""

    def __init__(self, context_tokens: int, longest_tokens: int | None = None) -> None:
        self.context_tokens = context_tokens
        self.longest_tokens = min(context_tokens, longest_tokens or context_tokens)

    def check(self, request: Body) -> None:
        """Raises Refusal (400). `request` has passed `check_prompts`."""
        volume = _volume_of(request)
        if volume is None:
            return
        tokens, most = volume.prompt_tokens * volume.samples, FULL_SEQUENCES * self.context_tokens
        if tokens > most:
            raise Refusal(
                400,
                f"the prompts have some {volume.prompt_tokens} tokens and n is {volume.samples}: {tokens} tokens; one "
                f"request may have {most}, {FULL_SEQUENCES} times the context length",
                field="n",
            )
        new = volume.num_prompts * min(volume.new_tokens or 0, self.longest_tokens)
        at = volume.samples * (new + (volume.prompt_tokens if volume.of_prompt else 0))
        if volume.logprobs * at > volume.most_logprobs:
            raise Refusal(
                400,
                f"{volume.logprobs} log-probabilities at each of up to {at} tokens are {volume.logprobs * at}; one "
                f"answer may have {volume.most_logprobs}: ask for fewer, or for fewer tokens or samples",
                field="top_logprobs",
            )


def _volume_of(request: Body) -> Volume | None:
    if isinstance(request, Generate):
        return _generating(request, request.text if request.text is not None else request.input_ids)
    if isinstance(request, VertexGenerate):
        prompts = [one.text if one.text is not None else one.input_ids for one in request.instances]
        return _generating(request.parameters or LogprobFields(), prompts)
    if isinstance(request, TextCompletion):
        num_prompts, tokens = _prompts(request.prompt)
        logprobs = 0 if request.logprobs is None else 1 + request.logprobs
        of_prompt = request.echo and bool(request.logprobs)
        samples = max(request.n, request.best_of or 1)
        return Volume(num_prompts, tokens, samples, request.max_tokens, logprobs, of_prompt, MAX_LOGPROBS_AS_TEXT)
    if isinstance(request, ChatCompletion):
        # The body's limit bounds the messages of the one prompt; prompt tokens get no log-probabilities.
        new_tokens = request.max_completion_tokens or request.max_tokens
        logprobs = 1 + (request.top_logprobs or 0) if request.logprobs else 0
        return Volume(1, 0, request.n, new_tokens, logprobs, False, MAX_LOGPROBS_AS_TEXT)
    if isinstance(request, Responses):
        logprobs = 1 + (request.top_logprobs or 0) if OUTPUT_LOGPROBS in (request.include or ()) else 0
        return Volume(1, 0, 1, request.max_output_tokens, logprobs, False, MAX_RESPONSES_LOGPROBS)
    return None


def _generating(request: LogprobFields, prompts: Any) -> Volume:
    num_prompts, tokens = _prompts(prompts)
    sampling = request.sampling_params
    each = [sampling] if isinstance(sampling, SamplingParams) else sampling or [SamplingParams()]
    new_tokens = max(DEFAULT_NEW_TOKENS if one.max_new_tokens is None else one.max_new_tokens for one in each)
    starts = request.logprob_start_len if isinstance(request.logprob_start_len, list) else [request.logprob_start_len]
    asked = any(request.return_logprob) if isinstance(request.return_logprob, list) else request.return_logprob
    logprobs = 1 + _largest(request.top_logprobs_num) + _most_ids(request.token_ids_logprob) if asked else 0
    of_prompt = any(one is not None and one >= 0 for one in starts)
    most = MAX_LOGPROBS
    if request.return_text_in_logprobs:
        most = MAX_LOGPROBS_AS_TEXT
        if logprobs > MAX_LOGPROBS_AS_TEXT_AT_EACH:
            raise Refusal(
                400,
                f"{logprobs} log-probabilities at each token with return_text_in_logprobs; allowed are "
                f"{MAX_LOGPROBS_AS_TEXT_AT_EACH}: ask for fewer, or for token ids only",
                field="top_logprobs_num",
            )
    elif request.stream:
        most = MAX_STREAMED_LOGPROBS * max(num_prompts * each[0].n, 1)  # each sequence has chunks of its own
    return Volume(num_prompts, tokens, each[0].n, new_tokens, logprobs, of_prompt, min(most, MAX_LOGPROBS))


def _prompts(value: Any) -> tuple[int, int]:
    """(number of prompts, number of their tokens) of a text, token ids, or a list of either."""
    if isinstance(value, str):
        return 1, len(value.encode(errors="replace")) // TEXT_BYTES_PER_TOKEN
    if not value or isinstance(value[0], int):
        return 1, len(value)
    return len(value), sum(_prompts(one)[1] for one in value)


def _largest(value: int | list[int] | None) -> int:
    return max(value, default=0) if isinstance(value, list) else value or 0


def _most_ids(value: Any) -> int:
    if not value or isinstance(value[0], int):
        return len(value or ())
    return max(len(one) for one in value)
