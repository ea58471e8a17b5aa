"""Tokenised training data: one sequence, two answers to one prompt, or a prompt to sample answers to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False, slots=True)
class Example:
    """`tokens` and `targets` int32 [n], `trained` bool [n]: targets[i] follows tokens[i], trained[i]: it counts.

    `where` is the row's place, for messages. `of` makes tokens and targets views of one array: 5 bytes a token.
    """

    tokens: Tokens
    targets: Tokens
    trained: Mask
    where: str = ""

    def __post_init__(self) -> None:
        for name, dtype in (("tokens", np.int32), ("targets", np.int32), ("trained", np.bool_)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        if not self.tokens.shape == self.targets.shape == self.trained.shape or self.tokens.ndim != 1:
            shapes = [list(array.shape) for array in (self.tokens, self.targets, self.trained)]
            raise ValueError(f"tokens, targets, trained: shapes {shapes}; they must be one-dimensional and equal")

    @classmethod
    def of(cls, ids: Sequence[int] | Integers, trained: Sequence[bool] | Mask, where: str = "") -> Example:
        """An example from n + 1 token ids and one flag per id (is it trained on); the first id is no target."""
        whole = np.asarray(ids, np.int32)
        return cls(whole[:-1], whole[1:], np.array(trained[1:], np.bool_), where)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.trained))

    @property
    def ids(self) -> Tokens:
        """int32 [n + 1]: the whole sequence."""
        return np.concatenate((self.tokens, self.targets[-1:]))

    def contents(self) -> Iterator[bytes]:
        """Bytes for digests: equal contents train the same."""
        yield len(self.tokens).to_bytes(8, "little")
        for array in (self.tokens, self.targets, self.trained):
            yield array.tobytes()


@dataclass(frozen=True, eq=False, slots=True)
class Pair:
    """Two answers to one prompt, each a complete example; their `trained` masks select the answers only."""

    chosen: Example
    rejected: Example
    where: str = ""

    @property
    def num_tokens(self) -> int:
        return self.chosen.num_tokens + self.rejected.num_tokens

    @property
    def num_trained(self) -> int:
        return self.chosen.num_trained + self.rejected.num_trained

    @property
    def examples(self) -> tuple[Example, Example]:
        return self.chosen, self.rejected

    def contents(self) -> Iterator[bytes]:
        for example in self.examples:
            yield from example.contents()


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """A question to sample answers to, for reinforcement learning.

    `ids` int32 [n]: with the generation prompt. `question`: the text of the last turn. `answer`: the dataset's answer,
    which a reward may compare with; None if the row has none. `columns`: the row as in its file.
    """

    ids: Tokens
    question: str
    answer: str | None
    columns: Mapping[str, Any]
    where: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        """No token of a prompt is trained on."""
        return 0

    def contents(self) -> Iterator[bytes]:
        yield len(self.ids).to_bytes(8, "little")
        yield self.ids.tobytes()
        yield repr((self.question, self.answer, sorted(self.columns.items(), key=lambda item: item[0]))).encode(
            "utf-8", "surrogatepass"
        )
