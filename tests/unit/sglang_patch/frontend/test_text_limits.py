"""Text that can't be a prompt is refused before it is tokenized, or after the part of it that is too much already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch.frontend.text_limits import PIECE_CHARACTERS, ClientGone, TextLimits

CONTEXT = 4096


class Words:
    """One token for each word of letters, or for each 40 spaces."""

    def __init__(self, normalizer: Any = None) -> None:
        self.backend_tokenizer = SimpleNamespace(normalizer=normalizer)
        self.seen: list[int] = []

    def get_vocab(self) -> dict[str, int]:
        return {" " * 40: 0, "a": 1}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.seen.append(len(text))
        return [1] * text.count("a") + [0] * (text.count(" ") // 40)


def stays() -> bool:
    return False


def test_more_characters_than_the_context_can_hold_are_refused_unread() -> None:
    tokenizer = Words()
    limits = TextLimits(tokenizer, CONTEXT)
    tokenizer.seen.clear()
    with pytest.raises(ValueError, match=r"163,841 characters; at most 163,840 can fit .* 4,096 tokens"):
        limits.check(" " * (40 * CONTEXT + 1), stays)
    assert not tokenizer.seen


def test_a_normalizer_may_shorten_text_to_a_third() -> None:
    assert TextLimits(Words(normalizer="NFC"), CONTEXT).max_characters == 3 * 40 * CONTEXT


def test_a_text_of_few_tokens_passes_however_long_it_is() -> None:
    tokenizer = Words()
    TextLimits(tokenizer, CONTEXT).check(" " * (40 * CONTEXT), stays)
    assert max(tokenizer.seen) == PIECE_CHARACTERS


def test_counting_ends_with_the_piece_that_is_too_much() -> None:
    tokenizer = Words()
    limits = TextLimits(tokenizer, CONTEXT)
    tokenizer.seen.clear()
    text = "a " * (PIECE_CHARACTERS - 1)
    with pytest.raises(ValueError, match=r"the first 65,536 have more than 8,192 tokens; .* is 4,096 tokens"):
        limits.check(text, stays)
    assert tokenizer.seen == [PIECE_CHARACTERS]


def test_a_short_text_is_left_to_the_exact_count() -> None:
    tokenizer = Words()
    limits = TextLimits(tokenizer, CONTEXT)
    tokenizer.seen.clear()
    limits.check("a" * PIECE_CHARACTERS, stays)
    assert not tokenizer.seen


def test_counting_ends_when_the_client_has_gone() -> None:
    tokenizer = Words()
    limits = TextLimits(tokenizer, CONTEXT)
    tokenizer.seen.clear()
    answers = iter([False, True])
    with pytest.raises(ClientGone):
        limits.check(" " * (2 * PIECE_CHARACTERS), lambda: next(answers))
    assert len(tokenizer.seen) == 1


def test_tokens_to_turn_into_text_are_bounded() -> None:
    limits = TextLimits(Words(), CONTEXT)
    limits.check_num_tokens(2 * CONTEXT)
    with pytest.raises(ValueError, match="8,193 tokens; allowed are 8,192"):
        limits.check_num_tokens(2 * CONTEXT + 1)
