"""Checks that SGLang 0.5.23 lacks: without them, a request can end the scheduler and the training in it.

Each function raises ValueError, which SGLang answers with status 400. `manager.py` calls the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_token_ids(input_ids: Sequence[int], vocab_size: int) -> None:
    """Found by tests on a server: bad ids cause an index error in the embedding, no ids an empty batch."""
    if not input_ids:
        raise ValueError("the prompt has no tokens; it must have at least one")
    _check_in_vocabulary("token id", input_ids, vocab_size)


def check_top_logprobs(top_logprobs_num: Any, vocab_size: int) -> None:
    """Found by tests on a server: `topk` fails for more entries than the vocabulary has."""
    if top_logprobs_num is not None and not 0 <= top_logprobs_num <= vocab_size:
        raise ValueError(f"top_logprobs_num is {top_logprobs_num}; allowed are 0 to {vocab_size}")


def check_lora_path(lora_path: Any, num_prompts: int, is_single: bool) -> None:
    """A list longer than the batch would increment usage counters for requests that never end."""
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
