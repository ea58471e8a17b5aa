"""Checks a request's sampling parameters, so that no invalid value reaches the scheduler.

SGLang 0.5.23 checks some values (`SamplingParams.verify`). Tests on a server found values that it does not check:
numbers that do not fit an int32 or int64 tensor, NaN, other types than declared (the scheduler then can't decode the
message), and unbounded sizes. Each function raises ValueError, which SGLang answers with status 400.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LARGEST_INT = 2**31 - 1  # SGLang keeps counts and token ids in int32 tensors
LARGEST_SEED = 2**63 - 1
LARGEST_BIAS = 1e30  # still fits float32 after division by the lowest temperature, 1e-6
SMALLEST_DIVISOR = 1e-6  # SGLang's own bound for the temperature
MAX_CHOICES = 128
MAX_STOP_CHARACTERS = 4096  # of all stop strings together, because they are compared after each token

COUNTS = {"max_new_tokens": 0, "min_new_tokens": 0, "top_k": -1, "n": 1, "stream_interval": 1}  # smallest value of each
NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
SWITCHES = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
TEXTS = ("json_schema", "regex", "ebnf", "structural_tag")


def check_sampling(parameters: Any, vocab_size: int) -> None:
    """`parameters`: one request's sampling parameters as the client sent them."""
    if parameters is None:
        return
    if not isinstance(parameters, Mapping):
        raise ValueError(f"sampling_params is {_shown(parameters)}; it must be an object")
    for name, smallest in COUNTS.items():
        _check_integer(name, parameters.get(name), smallest, MAX_CHOICES if name == "n" else LARGEST_INT)
    _check_integer("sampling_seed", parameters.get("sampling_seed"), -LARGEST_SEED - 1, LARGEST_SEED)
    for name in NUMBERS:
        _check_number(name, parameters.get(name))
    _check_repetition_penalty(parameters.get("repetition_penalty"))
    _check_types(parameters, SWITCHES, bool, "true or false")
    _check_types(parameters, TEXTS, str, "a string")
    _check_one_beam(parameters.get("beam_width"))
    _check_stop_token_ids(parameters.get("stop_token_ids"), vocab_size)
    _check_logit_bias(parameters.get("logit_bias"), vocab_size)
    _check_stop("stop", parameters.get("stop"))
    _check_stop("stop_regex", parameters.get("stop_regex"))


def check_choices(sampling_params: Any) -> None:
    """Checks `n` before SGLang expands a request into `n` requests. `sampling_params`: one request's, or a list."""
    for parameters in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
        if isinstance(parameters, Mapping) and parameters.get("n", 1) is None:
            raise ValueError("n is null; it must be an integer")
        if isinstance(parameters, Mapping):
            _check_integer("n", parameters.get("n"), 1, MAX_CHOICES)


def _check_integer(name: str, value: Any, smallest: int, largest: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= largest:
        raise ValueError(f"{name} is {_shown(value)}; it must be an integer from {smallest} to {largest}")


def _check_number(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise ValueError(f"{name} is {_shown(value)}; it must be a finite number")


def _check_repetition_penalty(value: float | None) -> None:
    """Checks the lower bound: SGLang divides logits by this value."""
    if value is not None and value < SMALLEST_DIVISOR:
        raise ValueError(f"repetition_penalty is {value}; it must be at least {SMALLEST_DIVISOR:g}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def _check_types(parameters: Mapping[str, Any], names: tuple[str, ...], kind: type, allowed: str) -> None:
    for name in names:
        value = parameters.get(name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} is {_shown(value)}; it must be {allowed}")


def _check_one_beam(width: Any) -> None:
    if width not in (None, 1) or isinstance(width, bool):
        raise ValueError(f"beam_width is {_shown(width)}; beam search is not served, only 1 is allowed")


def _check_stop_token_ids(ids: Any, vocab_size: int) -> None:
    """SGLang uses the ids as indices into the logits where a request of the same batch has `min_new_tokens`: an id
    outside the vocabulary would end that request too."""
    if ids is None:
        return
    if not isinstance(ids, list):
        raise ValueError(f"stop_token_ids is {_shown(ids)}; it must be a list of token ids")
    for token in ids:
        if token is not None:
            _check_integer("stop_token_ids: a token id", token, 0, vocab_size - 1)


def _check_logit_bias(bias: Any, vocab_size: int) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping) or len(bias) > vocab_size:
        raise ValueError(f"logit_bias is {_shown(bias)}; it must map at most {vocab_size} token ids to numbers")
    for token, value in bias.items():
        if not (isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10):
            raise ValueError(f"logit_bias: {_shown(token)} is no token id; allowed are 0 to {vocab_size - 1}")
        _check_number(f"logit_bias of token {token}", value)
        if abs(value) > LARGEST_BIAS:
            raise ValueError(f"logit_bias of token {token} is {value}; allowed is {LARGEST_BIAS:g} at most")


def _check_stop(name: str, stop: Any) -> None:
    if stop is None:
        return
    strings = stop if isinstance(stop, list) else [stop]
    if not all(isinstance(one, str) for one in strings):
        raise ValueError(f"{name} is {_shown(stop)}; it must be a string or a list of strings")
    length = sum(map(len, strings))
    if length > MAX_STOP_CHARACTERS:
        raise ValueError(f"{name} has {length} characters; allowed are {MAX_STOP_CHARACTERS}")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return "too large"
    return text if len(text) <= 80 else f"{text[:77]}..."
