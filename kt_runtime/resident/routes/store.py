"""A store of routes by key (`keys.py`), in a fixed amount of memory.

The rows form a ring: a new token takes the place of the one that was put longest ago. Tokens are small (a byte or two
for each layer and expert, about a hundredth of their KV), so there is no second tier: the rows are in the host's memory
from the start, whichever tier of the prefix cache holds the KV.

Shapes: N tokens, M layers with routed experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kt_runtime.errors import InvalidValueError
from kt_runtime.wire.status import KeptRoutes

Ids = npt.NDArray[np.integer]

ENTRY_BYTES = 256
"""Of a token beside its row, at most: its key, and its entry in Python's dictionary while that grows."""


class RouteStore:
    """`size_bytes`: of all rows and keys. Not thread-safe: the engine's thread puts and finds."""

    def __init__(self, num_layers: int, top_k: int, num_experts: int, size_bytes: int) -> None:
        """Raises InvalidValueError if not one token has room."""
        self.num_layers, self.top_k, self.size_bytes = num_layers, top_k, size_bytes
        token_bytes = self.bytes_of_token(num_layers, top_k, num_experts)
        self.capacity_tokens = size_bytes // token_bytes
        if not self.capacity_tokens:
            raise InvalidValueError(f"{size_bytes} bytes for routes: a token takes {token_bytes}")
        shape = (self.capacity_tokens, num_layers, top_k)
        self._ids = np.empty(shape, _smallest_dtype(num_experts))  # the system gives a page when it is written
        self._keys: list[bytes | None] = [None] * self.capacity_tokens
        self._rows: dict[bytes, int] = {}
        self._next = 0
        self.put_tokens = self.dropped_tokens = self.found_tokens = self.missed_tokens = 0

    @staticmethod
    def bytes_of_token(num_layers: int, top_k: int, num_experts: int) -> int:
        """What a token takes, with its key."""
        return num_layers * top_k * _smallest_dtype(num_experts).itemsize + ENTRY_BYTES

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, keys: Sequence[bytes], ids: Ids) -> None:
        """Keeps `ids` [N, M, K], of as many keys. A token that is there stays, unless it is among the older half."""
        rows, indices = [], []
        for index, key in enumerate(keys):
            if self._is_due(key):
                rows.append(self._place(key))
                indices.append(index)
        if rows:
            self._ids[rows] = ids[indices]
        self.put_tokens += len(rows)

    def renew(self, keys: Sequence[bytes]) -> None:
        """Makes the known ones among the tokens young again, as if they were put now: their prefix is in use."""
        old = [key for key in keys if key in self._rows and self._is_due(key)]
        if old:
            self.put(old, self._ids[[self._rows[key] for key in old]])

    def find(self, keys: Sequence[bytes]) -> tuple[npt.NDArray[np.bool_], Ids]:
        """Which of the tokens are known [N], and their ids [N, M, K], undefined for the others."""
        rows = np.array([self._rows.get(key, -1) for key in keys], np.int64)
        known = rows >= 0
        return known, self._ids[np.where(known, rows, 0)]

    def count(self, found: int, missed: int) -> None:
        """Notes what a training call found, for `status`."""
        self.found_tokens += found
        self.missed_tokens += missed

    def status(self) -> KeptRoutes:
        return KeptRoutes(
            size_bytes=self.size_bytes,
            capacity_tokens=self.capacity_tokens,
            tokens=len(self),
            dropped_tokens=self.dropped_tokens,
            found_tokens=self.found_tokens,
            missed_tokens=self.missed_tokens,
        )

    def _is_due(self, key: bytes) -> bool:
        """Whether the token has no row, or one that half of the others are younger than."""
        row = self._rows.get(key)
        if row is None:
            return True
        age = (self._next - row - 1) % self.capacity_tokens + 1  # of the youngest 1
        return 2 * age > self.capacity_tokens

    def _place(self, key: bytes) -> int:
        row, self._next = self._next, (self._next + 1) % self.capacity_tokens
        oldest = self._keys[row]
        if oldest is not None and self._rows.get(oldest) == row:
            del self._rows[oldest]
            self.dropped_tokens += oldest != key
        self._keys[row], self._rows[key] = key, row
        return row


def _smallest_dtype(num_experts: int) -> np.dtype[Any]:
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)
