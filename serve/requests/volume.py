"""How much one request may ask for in all: tokens of its sequences, and log-probabilities in its answer.

Both are products of fields that are harmless each. A prompt of 16,000 tokens with 1,024 log-probabilities at each is 16
million numbers with their tokens, some gigabytes of Python's objects, in an answer that is made as one piece.

Tokens of a text are not known before it is tokenized; two bytes a token are reckoned, more than texts have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kt_runtime.serve.requests.bounds import Body
from kt_runtime.serve.requests.chat import ChatCompletion
from kt_runtime.serve.requests.completions import TextCompletion
from kt_runtime.serve.requests.generate import Generate, LogprobFields, VertexGenerate
from kt_runtime.serve.requests.refusal import Refusal
from kt_runtime.serve.requests.responses import Responses
from kt_runtime.serve.requests.sampling import SamplingParams

MAX_LOGPROBS = 4 * 1024 * 1024
FULL_SEQUENCES = 64  # of the context's length, in one request
TEXT_BYTES_PER_TOKEN = 2
DEFAULT_NEW_TOKENS = 128  # SGLang's, where /generate does not say


@dataclass(frozen=True)
class Volume:
    """`prompt_tokens`: of all prompts. `logprobs`: how many at each token; `of_prompt`: also at the prompts' tokens.

    `new_tokens`: of one sample of one prompt.
    """

    num_prompts: int
    prompt_tokens: int
    samples: int
    new_tokens: int
    logprobs: int
    of_prompt: bool


class VolumeLimit:
    def __init__(self, context_tokens: int) -> None:
        self.context_tokens = context_tokens

    def check(self, request: Body) -> None:
        """Raises Refusal (400). `request` has passed `check_prompts`."""
        volume = self._volume_of(request)
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
        new = volume.num_prompts * min(volume.new_tokens, self.context_tokens)
        at = volume.samples * (new + (volume.prompt_tokens if volume.of_prompt else 0))
        if volume.logprobs * at > MAX_LOGPROBS:
            raise Refusal(
                400,
                f"{volume.logprobs} log-probabilities at each of up to {at} tokens are {volume.logprobs * at}; one "
                f"answer may have {MAX_LOGPROBS}: ask for fewer, or for fewer tokens or samples",
                field="top_logprobs",
            )

    def _volume_of(self, request: Body) -> Volume | None:
        if isinstance(request, Generate):
            return self._generating(request, request.text if request.text is not None else request.input_ids)
        if isinstance(request, VertexGenerate):
            prompts = [one.text if one.text is not None else one.input_ids for one in request.instances]
            return self._generating(request.parameters or LogprobFields(), prompts)
        if isinstance(request, TextCompletion):
            num_prompts, tokens = _prompts(request.prompt)
            samples = max(request.n, request.best_of or 1)
            return Volume(num_prompts, tokens, samples, request.max_tokens, request.logprobs or 0, request.echo)
        if isinstance(request, ChatCompletion):
            # The messages of one prompt are bounded by the body's limit; their tokens get no log-probabilities.
            new_tokens = request.max_completion_tokens or request.max_tokens or self.context_tokens
            return Volume(1, 0, request.n, new_tokens, request.top_logprobs or 0, False)
        if isinstance(request, Responses):
            return Volume(1, 0, 1, request.max_output_tokens or self.context_tokens, request.top_logprobs or 0, False)
        return None

    def _generating(self, request: LogprobFields, prompts: Any) -> Volume:
        num_prompts, tokens = _prompts(prompts)
        sampling = request.sampling_params
        each = [sampling] if isinstance(sampling, SamplingParams) else sampling or [SamplingParams()]
        new_tokens = max(DEFAULT_NEW_TOKENS if one.max_new_tokens is None else one.max_new_tokens for one in each)
        starts = (
            request.logprob_start_len if isinstance(request.logprob_start_len, list) else [request.logprob_start_len]
        )
        logprobs = _largest(request.top_logprobs_num) + _most_ids(request.token_ids_logprob)
        asked = any(request.return_logprob) if isinstance(request.return_logprob, list) else request.return_logprob
        of_prompt = any(one is not None and one >= 0 for one in starts)
        return Volume(num_prompts, tokens, each[0].n, new_tokens, logprobs if asked else 0, of_prompt)


def _prompts(value: Any) -> tuple[int, int]:
    """Number of prompts and of their tokens: of a text, token ids, or a list of either."""
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
