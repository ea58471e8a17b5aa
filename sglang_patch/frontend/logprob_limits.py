"""How many log-probabilities one request may be given, and the end of a request whose answer has more.

An entry is one token with its log-probability: at each position the token itself, `top_logprobs_num` others, and those
of `token_ids_logprob`. Measured on one Zen 4 core with SGLang 0.5.23:

    tuples in the frontend, kept to the answer's end      140 bytes, 190 with their text
    /generate's JSON                                      0.07 µs
    /v1/completions, a dict for each position             0.2 to 0.8 µs
    /v1/responses, an object of pydantic's for each       5 to 13 µs, the more the slower
    tokens back into text, 50 positions at a time         1.8 µs

All but the last is one piece of work in the event loop, during which nobody else is answered: the limits keep it below
a second or so. An answer of /v1/chat/completions is written in pieces (`chat_logprobs.py`); memory is its limit.
A stream of /generate sends all entries again with each token, so that what counts is the last chunk.

`serve/requests/checks/volume.py` refuses what a body asks for by its numbers. A request that does not say how many
tokens it wants gets as many entries as the limit allows, and ends with an error only when its answer is longer.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

MAX_PROMPT_LOGPROBS = 1_000_000
MAX_PROMPT_LOGPROBS_AS_TEXT = 100_000
MAX_LOGPROBS = 4 * 1024 * 1024
MAX_LOGPROBS_AS_TEXT = 1024 * 1024
MAX_LOGPROBS_AS_TEXT_AT_EACH = 129  # 50 positions of 16 requests at once: 0.2 s
MAX_RESPONSES_LOGPROBS = 88 * 1024  # 20 others at each of 4,096 tokens
MAX_STREAMED_LOGPROBS = 512 * 1024
RESPONSES_PATH = "/v1/responses"


class TooManyLogprobs(ValueError):
    """An answer has more log-probabilities than its request may have; the message says how many those are."""


def entries_at_each(request: Any) -> int:
    """How many entries a position has. `request`: SGLang's, of one prompt."""
    return 1 + (request.top_logprobs_num or 0) + len(request.token_ids_logprob or ())


def check_prompt_logprobs(request: Any, num_prompt_tokens: int) -> None:
    """Raises ValueError, which SGLang answers with status 400. All of a prompt's are made in the event loop at once,
    with `return_text_in_logprobs` after each token has become text."""
    start = request.logprob_start_len
    if not getattr(request, "return_logprob", False) or not isinstance(start, int) or start < 0:
        return
    positions, each = max(0, num_prompt_tokens - start), entries_at_each(request)
    allowed = MAX_PROMPT_LOGPROBS_AS_TEXT if request.return_text_in_logprobs else MAX_PROMPT_LOGPROBS
    if positions * each > allowed:
        raise ValueError(
            f"log-probabilities of {each:,} tokens at each of {positions:,} positions of the prompt are "
            f"{positions * each:,}; allowed are {allowed:,}. Ask for fewer with top_logprobs_num or "
            f"token_ids_logprob, or for fewer positions with logprob_start_len"
        )


def most_entries(request: Any, path: str | None) -> int:
    """What the answer to one sequence of `request` may have. `path`: of the route that was asked."""
    samples = (request.sampling_params or {}).get("n") or 1
    if path == RESPONSES_PATH:
        return MAX_RESPONSES_LOGPROBS
    if request.return_text_in_logprobs:
        return MAX_LOGPROBS_AS_TEXT // samples
    return (MAX_STREAMED_LOGPROBS if request.stream else MAX_LOGPROBS) // samples


def check_answer_logprobs(state: Any) -> None:
    """Raises TooManyLogprobs. `state`: SGLang's of one sequence, with the entries that have come so far."""
    request = state.obj
    most = getattr(request, "most_logprobs", None) or most_entries(request, None)
    positions, each = len(state.output_token_logprobs_val), entries_at_each(request)
    if request.stream and not request.return_text_in_logprobs:
        positions += len(state.input_token_logprobs_val)
    if positions * each > most:
        raise TooManyLogprobs(
            f"the answer has {positions:,} tokens with {each:,} log-probabilities each; one sequence of this request "
            f"may have {most:,}. Ask for fewer log-probabilities or samples, or set a limit of new tokens"
        )


def too_many_reason(error: TooManyLogprobs) -> dict[str, Any]:
    """SGLang's `finish_reason` of a request that ends with status 400."""
    return {
        "type": "abort",
        "message": str(error),
        "status_code": HTTPStatus.BAD_REQUEST,
        "err_type": "BadRequestError",
    }
