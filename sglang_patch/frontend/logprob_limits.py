"""Limits the number of log-probabilities per request, and ends a request whose answer has more.

An entry is one token with its log-probability. Each position has the token itself, `top_logprobs_num` others, and the
tokens of `token_ids_logprob`. Cost per entry, measured on one Zen 4 core with SGLang 0.5.23:

    tuples in the frontend, kept until the answer's end   140 bytes, 190 with their text
    /generate's JSON                                      0.07 µs
    /v1/completions, a dict for each position             0.2 to 0.8 µs
    /v1/responses, a pydantic object for each             5 to 13 µs, slower with more entries
    detokenization, 50 positions at a time                1.8 µs

All but the last run in the event loop without yielding and block all other requests. The limits keep this time below
about a second. An answer of /v1/chat/completions is written in pieces (`chat_logprobs.py`), so memory is its limit. A
stream of /generate repeats all entries with each token, so its last chunk determines the cost.

`serve/requests/checks/volume.py` refuses bodies that explicitly ask for too many entries. A request without a number of
tokens gets as many entries as the limit allows, and ends with an error only if its answer is longer.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

MAX_PROMPT_LOGPROBS = 1_000_000
MAX_PROMPT_LOGPROBS_AS_TEXT = 100_000
MAX_LOGPROBS = 4 * 1024 * 1024
MAX_LOGPROBS_AS_TEXT = 1024 * 1024
MAX_LOGPROBS_AS_TEXT_AT_EACH = 129  # per position; 50 positions of 16 requests at once take 0.2 s
MAX_RESPONSES_LOGPROBS = 88 * 1024  # 20 others at each of 4,096 tokens
MAX_STREAMED_LOGPROBS = 512 * 1024
RESPONSES_PATH = "/v1/responses"


class TooManyLogprobs(ValueError):
    """An answer has more log-probabilities than its request may have. The message contains both numbers."""


def entries_at_each(request: Any) -> int:
    """Number of entries per position. `request`: SGLang's request for one prompt."""
    return 1 + (request.top_logprobs_num or 0) + len(request.token_ids_logprob or ())


def check_prompt_logprobs(request: Any, num_prompt_tokens: int) -> None:
    """Raises ValueError, which SGLang answers with status 400. SGLang creates all of a prompt's entries in the event
    loop without yielding, with `return_text_in_logprobs` after detokenizing each token."""
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
    """Highest number of entries in the answer to one sequence of `request`. `path`: the path of its HTTP route."""
    samples = (request.sampling_params or {}).get("n") or 1
    if path == RESPONSES_PATH:
        return MAX_RESPONSES_LOGPROBS
    if request.return_text_in_logprobs:
        return MAX_LOGPROBS_AS_TEXT // samples
    return (MAX_STREAMED_LOGPROBS if request.stream else MAX_LOGPROBS) // samples


def check_answer_logprobs(state: Any) -> None:
    """Raises TooManyLogprobs. `state`: SGLang's state of one sequence, with the entries received so far."""
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
    """SGLang's `finish_reason` for a request that ends with status 400."""
    return {
        "type": "abort",
        "message": str(error),
        "status_code": HTTPStatus.BAD_REQUEST,
        "err_type": "BadRequestError",
    }
