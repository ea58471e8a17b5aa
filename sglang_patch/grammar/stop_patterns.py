"""`stop_regex` is matched in linear time, over a bounded piece of the answer.

SGLang 0.5.23 symbols and reasons:

- `managers.schedule_batch.re`: the module of regular expressions that a request's `stop_regex` is searched with, after
  each token and in the scheduler's thread. Python's `re` goes back and tries again; with `(a+)+b$` each further token
  doubles the time, and nothing can interrupt it. RE2 reads a text once.
- `sampling.sampling_params.get_max_seq_length`: how many tokens an answer's end is searched; SGLang searches all of a
  long answer for `a+`, and fails with a server error for a pattern that it can't parse. What RE2 does not know
  (references back, looking around, more than 1000 repetitions) is refused here, with ValueError: status 400.
- `sampling.sampling_params.MAX_STOP_REGEX_COUNT`: a pattern within these bounds takes RE2 some milliseconds a token.
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
MAX_PATTERNS = 2  # of one request; SGLang bounds their length
WINDOW_TOKENS = 256  # at the end of an answer, in which a match is looked for
COMPILED_BYTES = 16 << 10  # of memory for one pattern; RE2 refuses what needs more
NUM_COMPILED = 256  # patterns kept


class LinearPatterns:
    """What SGLang uses of `re`: `search`, and the exception `error` of a pattern that can't be compiled."""

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
    """Raises `re2.error`."""
    import re2

    options = re2.Options()
    options.max_mem = COMPILED_BYTES
    options.log_errors = False
    return re2.compile(pattern, options)


def window_tokens(original: Callable[[str], int], pattern: str) -> int:
    """Longest match of `pattern` in tokens, at most WINDOW_TOKENS. Raises ValueError for a pattern not allowed."""
    import re2

    try:
        compiled(pattern)
    except (re2.error, UnicodeEncodeError) as error:
        raise ValueError(f"stop_regex {pattern!r} is refused: {_reason(error)}; allowed is RE2's syntax") from None
    try:
        return min(original(pattern), WINDOW_TOKENS)
    except Exception:  # noqa: BLE001 - syntax that RE2 knows and Python does not
        return WINDOW_TOKENS


def _reason(error: Exception) -> str:
    first = error.args[0] if error.args else str(error)
    return first.decode(errors="replace") if isinstance(first, bytes) else str(error)
