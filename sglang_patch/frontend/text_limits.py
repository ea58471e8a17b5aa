"""Whether a text can be a prompt of this model, found out without tokenizing all of it. Knows tokenizers, not SGLang.

A text is refused by the first of these that holds (ValueError):

1. It has more characters than the context length times the longest token of the vocabulary. Exact: no tokenizer of the
   supported kinds covers more text with one token. A tokenizer with a normalizer may shorten text first, by Unicode's
   composition to a third at most.
2. It is longer than 8 characters for each token of the context, and its pieces of 64 KiB, tokenized one by one, come to
   more than twice the context length. Cutting changes how the text next to a cut is tokenized, a few tokens of some
   thousands, so twice is far on the safe side. The rest of the text is not looked at: text of 2 MB takes seconds and
   300 MB of memory to tokenize at once, its pieces up to twice the context length neither.

What passes is tokenized whole and then compared with the context length exactly, by SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PIECE_CHARACTERS = 64 * 1024
COUNTED_CHARACTERS_PER_TOKEN = 8
MOST_COMPOSED = 3
LENIENCE = 2


class ClientGone(ValueError):
    """The client has gone while its text waited or was tokenized; nobody reads the answer."""


class TextLimits:
    """For one tokenizer, a transformers one, with or without Rust. Methods may be called in any thread."""

    def __init__(self, tokenizer: Any, context_tokens: int) -> None:
        self.context_tokens = context_tokens
        self._encode = tokenizer.encode
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        shortens = backend is None or backend.normalizer is not None
        self.max_characters = context_tokens * longest * (MOST_COMPOSED if shortens else 1)
        self.counted_from = max(PIECE_CHARACTERS, COUNTED_CHARACTERS_PER_TOKEN * context_tokens)
        # A truncation that tokenizer.json asks for is switched off with the first use: now, not in two threads at once.
        self._encode("a", add_special_tokens=False)

    def check(self, text: str, is_gone: Callable[[], bool]) -> None:
        """Raises ValueError for a text that is too long, ClientGone when `is_gone()`, asked between two pieces."""
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
        """Of a text that is asked for by its tokens."""
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
