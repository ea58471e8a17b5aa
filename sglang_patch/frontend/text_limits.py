"""Refuses texts that are too long for the model's context without tokenizing all of them. Does not import SGLang.

The first of these conditions that holds refuses a text (ValueError):

1. The text has more characters than the context length times the longest token of the vocabulary. This bound is exact:
   no supported kind of tokenizer covers more text with one token. A tokenizer with a normalizer may first shorten the
   text, by Unicode composition to a third at most.
2. The text is longer than 8 characters per token of the context, and its pieces of 64 KiB, tokenized one by one, have
   more than twice the context length in tokens. Cutting changes the tokens next to a cut, a few of some thousands, so a
   factor of two is far on the safe side. The rest of the text is not tokenized. Tokenizing 2 MB of text at once takes
   seconds and 300 MB of memory; tokenizing pieces up to twice the context length takes neither.

A text that passes is tokenized as a whole, and SGLang compares it exactly with the context length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PIECE_CHARACTERS = 64 * 1024
COUNTED_CHARACTERS_PER_TOKEN = 8
MOST_COMPOSED = 3
LENIENCE = 2


class ClientGone(ValueError):
    """The client disconnected while its text waited or was tokenized."""


class TextLimits:
    """Limits for one transformers tokenizer, fast (Rust) or slow. Methods may be called in any thread."""

    def __init__(self, tokenizer: Any, context_tokens: int) -> None:
        self.context_tokens = context_tokens
        self._encode = tokenizer.encode
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        shortens = backend is None or backend.normalizer is not None
        self.max_characters = context_tokens * longest * (MOST_COMPOSED if shortens else 1)
        self.counted_from = max(PIECE_CHARACTERS, COUNTED_CHARACTERS_PER_TOKEN * context_tokens)
        # The first call switches off a truncation from tokenizer.json. It happens here, before several threads encode.
        self._encode("a", add_special_tokens=False)

    def check(self, text: str, is_gone: Callable[[], bool]) -> None:
        """Raises ValueError for a text that is too long, ClientGone if `is_gone()` is true before a piece."""
        self.check_characters(text)
        if len(text) > self.counted_from:
            self._count_pieces(text, is_gone)

    def check_characters(self, text: str) -> None:
        if len(text) > self.max_characters:
            raise ValueError(
                f"the text has {len(text):,} characters; at most {self.max_characters:,} can fit into the model's "
                f"context length of {self.context_tokens:,} tokens"
            )

    def check_num_tokens(self, num_tokens: int) -> None:
        """Raises ValueError if a detokenization request has too many tokens."""
        most = LENIENCE * self.context_tokens
        if num_tokens > most:
            raise ValueError(f"{num_tokens:,} tokens; allowed are {most:,}, twice the model's context length")

    def _count_pieces(self, text: str, is_gone: Callable[[], bool]) -> None:
        num_tokens = 0
        for begin in range(0, len(text), PIECE_CHARACTERS):
            if is_gone():
                raise ClientGone("the client has gone")
            num_tokens += len(self._encode(text[begin : begin + PIECE_CHARACTERS], add_special_tokens=False))
            if num_tokens > LENIENCE * self.context_tokens:
                raise ValueError(
                    f"the text has {len(text):,} characters, of which the first {begin + PIECE_CHARACTERS:,} have more "
                    f"than {LENIENCE * self.context_tokens:,} tokens; the model's context length is "
                    f"{self.context_tokens:,} tokens"
                )
