"""A store of routes by key (`keys.py`), in a fixed amount of memory, all of which is taken at the start.

The rows form a ring: a new token takes the place of the one that was put longest ago. Tokens are small (a byte or two
for each layer and expert, about a hundredth of their KV), so there is no second tier: the rows are in the host's memory
from the start, whichever tier of the prefix cache holds the KV.

Rows are found by a hash table with chains (Knuth, The Art of Computer Programming, volume 3, section 6.4): one bucket
for each row. Python's dictionary would grow for as long as keys come and go: it uses a deleted key's entry again only
after it has moved to new memory.

Shapes: N tokens, M layers with routed experts, K experts per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kt_runtime.errors import InvalidValueError
from kt_runtime.resident.routes.keys import KEY_BYTES
from kt_runtime.wire.status import KeptRoutes

Ids = npt.NDArray[np.integer]

ENTRY_BYTES = KEY_BYTES + 2 * array("q").itemsize
"""Bytes of a token in addition to its row: its key, its bucket and its link."""

END, UNUSED = -1, -2  # the end of a chain; the link of a row that is in none


class RouteStore:
    """`size_bytes`: memory of all rows and keys. Not thread-safe: the engine's thread puts and finds."""

    def __init__(self, num_layers: int, top_k: int, num_experts: int, size_bytes: int) -> None:
        """Raises InvalidValueError if not one token has room."""
        self.num_layers, self.top_k, self.size_bytes = num_layers, top_k, size_bytes
        token_bytes = self.bytes_of_token(num_layers, top_k, num_experts)
        self.capacity_tokens = size_bytes // token_bytes
        if not self.capacity_tokens:
            raise InvalidValueError(f"{size_bytes} bytes for routes: a token takes {token_bytes}")
        shape = (self.capacity_tokens, num_layers, top_k)
        self._ids = np.full(shape, 0, _smallest_dtype(num_experts))  # written, so that the system has given the pages
        self._keys = bytearray(b"\xff") * (KEY_BYTES * self.capacity_tokens)
        self._buckets = array("q", [END]) * self.capacity_tokens  # the first row of each chain
        self._links = array("q", [UNUSED]) * self.capacity_tokens  # the next row of the chain, for each row
        self._tokens = self._next = 0
        self.put_tokens = self.dropped_tokens = self.found_tokens = self.missed_tokens = 0

    @staticmethod
    def bytes_of_token(num_layers: int, top_k: int, num_experts: int) -> int:
        """Bytes of a token's row and key."""
        return num_layers * top_k * _smallest_dtype(num_experts).itemsize + ENTRY_BYTES

    def __len__(self) -> int:
        return self._tokens

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
        """Puts those known tokens again that are in the older half, so that they are the newest: their prefix is in
        use."""
        old = [key for key in keys if self._row(key) != END and self._is_due(key)]
        if old:
            self.put(old, self._ids[[self._row(key) for key in old]])

    def find(self, keys: Sequence[bytes]) -> tuple[npt.NDArray[np.bool_], Ids]:
        """Which of the tokens are known [N], and their ids [N, M, K], undefined for the others."""
        rows = np.array([self._row(key) for key in keys], np.int64)
        known = rows != END
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
        """Whether the token has no row, or is in the older half of the rows."""
        row = self._row(key)
        if row == END:
            return True
        age = (self._next - row - 1) % self.capacity_tokens + 1  # the newest row's age is 1
        return 2 * age > self.capacity_tokens

    def _place(self, key: bytes) -> int:
        """Gives the key a row, that of the token that was put longest ago, and returns it."""
        known = self._row(key)
        if known != END:
            self._free(known)
        row, self._next = self._next, (self._next + 1) % self.capacity_tokens
        if self._links[row] != UNUSED:
            self._free(row)
            self.dropped_tokens += 1
        bucket = self._bucket(key)
        self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        self._links[row], self._buckets[bucket] = self._buckets[bucket], row
        self._tokens += 1
        return row

    def _free(self, row: int) -> None:
        """Takes a row out of its chain."""
        bucket = self._bucket(bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]))
        before, at = END, self._buckets[bucket]
        while at != row:
            before, at = at, self._links[at]
        if before == END:
            self._buckets[bucket] = self._links[row]
        else:
            self._links[before] = self._links[row]
        self._links[row] = UNUSED
        self._tokens -= 1

    def _row(self, key: bytes) -> int:
        """The key's row; END: it has none."""
        row = self._buckets[self._bucket(key)]
        while row != END and self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] != key:
            row = self._links[row]
        return row

    def _bucket(self, key: bytes) -> int:
        """The key's bucket. Python's hash has a secret seed, so nobody can choose tokens whose keys share a bucket."""
        return hash(key) % self.capacity_tokens


def _smallest_dtype(num_experts: int) -> np.dtype[Any]:
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)
