"""Text that is tokenised in parts, with a mask of the answers' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kt_runtime.train.examples import Mask, Tokens

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is tokenised on its own. Its first `num_answer_chars` characters belong to an answer."""

    text: str
    num_answer_chars: int = 0

    @property
    def whole(self) -> Piece:
        return Piece(self.text, len(self.text))

    @property
    def none(self) -> Piece:
        return Piece(self.text)


class Template(Protocol):
    """A chat template or a named one. `where` is the row's place, for errors."""

    def conversation(self, messages: Messages, tools: Tools, where: str, *, last_only: bool) -> list[Piece]:
        """Counts every answer, or only the last one. The last message is the assistant's."""

    def prompt(self, messages: Messages, tools: Tools, where: str) -> list[Piece]:
        """The prompt for the next answer."""

    def reply(
        self, messages: Messages, answer: dict[str, Any], tools: Tools, where: str
    ) -> tuple[list[Piece], list[Piece]]:
        """(prompt, answer)."""


def tokenize(tokenizer: Any, rows: Sequence[Sequence[Piece]]) -> list[tuple[Tokens, Mask]]:
    """Token ids int32 [n] and answer mask bool [n] of each row. `tokenizer` is a fast one."""
    pieces = [piece for row in rows for piece in row]
    mixed = [0 < piece.num_answer_chars < len(piece.text) for piece in pieces]
    plain = iter(_encode(tokenizer, [piece.text for piece, both in zip(pieces, mixed, strict=True) if not both]))
    marked = iter(_encode(tokenizer, [piece.text for piece, both in zip(pieces, mixed, strict=True) if both], True))
    parts = []
    for piece, both in zip(pieces, mixed, strict=True):
        ids, starts = next(marked if both else plain)
        of_answer = np.array([start < piece.num_answer_chars for start in starts], np.bool_) if both else None
        parts.append((ids, np.full(len(ids), piece.num_answer_chars > 0) if of_answer is None else of_answer))
    remaining = iter(parts)
    return [_joined([next(remaining) for _ in row]) for row in rows]


def _joined(parts: list[tuple[list[int], Mask]]) -> tuple[Tokens, Mask]:
    ids = np.array([token for tokens, _ in parts for token in tokens], np.int32)
    return ids, np.concatenate([mask for _, mask in parts]) if parts else np.zeros(0, np.bool_)


def _encode(tokenizer: Any, texts: list[str], with_starts: bool = False) -> list[tuple[list[int], list[int]]]:
    """Ids and, if `with_starts`, the index of each token's first character."""
    if not texts:
        return []
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=with_starts,
        verbose=False,
    )
    if not with_starts:
        return [(ids, []) for ids in encoded["input_ids"]]
    starts = [[start for start, _ in offsets] for offsets in encoded["offset_mapping"]]
    return list(zip(encoded["input_ids"], starts, strict=True))
