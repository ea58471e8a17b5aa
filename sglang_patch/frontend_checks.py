"""What SGLang 0.5.23 does not check about a request, although it ends the scheduler, and with it the training in it.

Each function raises ValueError, which SGLang answers with status 400. Called by `frontend_manager.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_PROMPT_LOGPROBS = 1_000_000
MAX_PROMPT_LOGPROBS_AS_TEXT = 100_000
MAX_OUTPUT_LOGPROBS = 8_000_000


def check_token_ids(input_ids: Sequence[int], vocab_size: int) -> None:
    """Found by sending them: an index error in the embedding, or an empty batch."""
    if not input_ids:
        raise ValueError("the prompt has no tokens; it must have at least one")
    _check_in_vocabulary("token id", input_ids, vocab_size)


def check_top_logprobs(top_logprobs_num: Any, vocab_size: int) -> None:
    """Found by sending it: `topk` of more numbers than the vocabulary has."""
    if top_logprobs_num is not None and not 0 <= top_logprobs_num <= vocab_size:
        raise ValueError(f"top_logprobs_num is {top_logprobs_num}; allowed are 0 to {vocab_size}")


def check_logprob_entries(request: Any, num_prompt_tokens: int, context_tokens: int) -> None:
    """Each entry is a tuple in the frontend's memory, some 150 bytes, and a piece of the answer; all of a prompt's are
    made in the event loop at once, with `return_text_in_logprobs` after tokenizing each back into text."""
    if not getattr(request, "return_logprob", False):
        return
    start = request.logprob_start_len
    prompt_positions = max(0, num_prompt_tokens - start) if isinstance(start, int) and start >= 0 else 0
    new_tokens = (request.sampling_params or {}).get("max_new_tokens")
    room = max(0, context_tokens - num_prompt_tokens)
    output_positions = min(room, new_tokens) if isinstance(new_tokens, int) else room
    each = 1 + (request.top_logprobs_num or 0) + len(request.token_ids_logprob or ())
    most = MAX_PROMPT_LOGPROBS_AS_TEXT if request.return_text_in_logprobs else MAX_PROMPT_LOGPROBS
    for what, positions, allowed in (
        ("prompt", prompt_positions, most),
        ("answer", output_positions, MAX_OUTPUT_LOGPROBS),
    ):
        if positions * each > allowed:
            raise ValueError(
                f"log-probabilities of {each:,} tokens at each of {positions:,} positions of the {what} are "
                f"{positions * each:,}; allowed are {allowed:,}. Ask for fewer with top_logprobs_num or "
                f"token_ids_logprob, or for fewer positions with logprob_start_len or max_new_tokens"
            )


def check_stop_token_ids(sampling_params: Mapping[str, Any], vocab_size: int) -> None:
    """With `min_new_tokens` they are positions in the logits."""
    stop_ids = sampling_params.get("stop_token_ids")
    if isinstance(stop_ids, list) and stop_ids and sampling_params.get("min_new_tokens"):
        _check_in_vocabulary("stop_token_ids: token id", stop_ids, vocab_size)


def check_lora_path(lora_path: Any, num_prompts: int, is_single: bool) -> None:
    """A list longer than the batch would count requests that never end."""
    if isinstance(lora_path, list) and (is_single or len(lora_path) != num_prompts):
        raise ValueError(
            f"lora_path: a list of {len(lora_path)} for {num_prompts} request(s); it must be one name, or a list with "
            "one for each prompt"
        )


def _check_in_vocabulary(what: str, ids: Sequence[int], vocab_size: int) -> None:
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{what} {wrong} is not in the model's vocabulary; allowed are 0 to {vocab_size - 1}")
