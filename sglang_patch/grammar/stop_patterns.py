"""Matches `stop_regex` in linear time, in a bounded window at the end of the answer.

SGLang 0.5.23 symbols and reasons:

- `managers.schedule_batch.re`: the regular expression module that searches for a request's `stop_regex` after each
  token, in the scheduler's thread. Python's `re` backtracks: with `(a+)+b$` each further token doubles the time, and
  nothing can interrupt the search. RE2 reads a text once.
- `sampling.sampling_params.get_max_seq_length`: the number of tokens at an answer's end that are searched. SGLang
  searches all of a long answer for `a+`, and fails with a server error for a pattern that it can't parse. A pattern
  that RE2 does not support (backreferences, lookaround, more than 1000 repetitions) raises ValueError here: status 400.
- `sampling.sampling_params.MAX_STOP_REGEX_COUNT`: a pattern within these bounds takes RE2 some milliseconds per token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.managers.schedule_batch.re",
    "sglang.srt.sampling.sampling_params.get_max_seq_length",
    "sglang.srt.sampling.sampling_params.MAX_STOP_REGEX_COUNT",
)
MAX_PATTERNS = 2  # per request; SGLang bounds their length
WINDOW_TOKENS = 256  # tokens at the end of an answer that are searched for a match
COMPILED_BYTES = 16 << 10  # memory for one compiled pattern; RE2 refuses a larger one
NUM_COMPILED = 256  # cached patterns


class LinearPatterns:
    """The part of `re` that SGLang uses: `search`, and `error`, the exception for a pattern that can't be compiled."""

    def __init__(self) -> None:
        import re2

        self.error = re2.error

    def search(self, pattern: str, text: str) -> Any:
        return compiled(pattern).search(text)


def install(hooks: Hooks) -> None:
    module, longest, most = SYMBOLS
    hooks.set(module, linear_patterns())
    hooks.around(longest, window_tokens)
    hooks.set(most, MAX_PATTERNS)


@cache
def linear_patterns() -> LinearPatterns:
    return LinearPatterns()


@lru_cache(maxsize=NUM_COMPILED)
def compiled(pattern: str) -> Any:
    """The compiled pattern, cached. Raises `re2.error`."""
    import re2

    options = re2.Options()
    options.max_mem = COMPILED_BYTES
    options.log_errors = False
    return re2.compile(pattern, options)


def window_tokens(original: Callable[[str], int], pattern: str) -> int:
    """Longest match of `pattern` in tokens, at most WINDOW_TOKENS. Raises ValueError for an unsupported pattern."""
    import re2

    try:
        compiled(pattern)
    except (re2.error, UnicodeEncodeError) as error:
        raise ValueError(f"stop_regex {pattern!r} is refused: {_reason(error)}; allowed is RE2's syntax") from None
    try:
        return min(original(pattern), WINDOW_TOKENS)
    except Exception:  # noqa: BLE001 - RE2 supports this syntax, Python does not
        return WINDOW_TOKENS


def _reason(error: Exception) -> str:
    first = error.args[0] if error.args else str(error)
    return first.decode(errors="replace") if isinstance(first, bytes) else str(error)
