"""Keys of tokens: a hash of the adapter's version and of the sequence up to the token.

A token's routes depend on nothing else: on the base's weights, the adapter's and the tokens before it. So a key finds
them whoever computed them: another request with the same prefix, or one whose prefix came from the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
BASE = ""
"""The version of the base model without an adapter."""

Tokens = Sequence[int] | npt.NDArray[np.integer]


class TokenKeys:
    """The keys of one sequence, which grows. `version`: content hash of the adapter, or `BASE`. `length`: tokens."""

    def __init__(self, version: str) -> None:
        self.version, self.length = version, 0
        self._hash = hashlib.blake2b(version.encode(), digest_size=KEY_BYTES)

    def extend(self, tokens: Tokens) -> list[bytes]:
        """The keys of the next tokens, which follow those of earlier calls."""
        data = np.asarray(tokens, "<u4").tobytes()
        keys = []
        for start in range(0, len(data), 4):
            self._hash.update(data[start : start + 4])
            keys.append(self._hash.digest())
        self.length += len(keys)
        return keys
